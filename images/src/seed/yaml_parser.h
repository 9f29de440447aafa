/* What yaml.c (collections) and yaml_scalar.c share: the cursor and the buffer. */
#ifndef YAML_PARSER_H
#define YAML_PARSER_H
#include "yaml.h"

#include <setjmp.h>

struct parser {
    const char *s;              /* NUL-terminated, line ends are \n */
    size_t at, start;           /* cursor; first character of its line */
    int line, depth;
    int unfinished;             /* the last line had no line end of its own */
    char *error;
    size_t error_size;
    jmp_buf failed;
};

struct buffer { char *text; size_t len, room; };

void fail(struct parser *p, const char *what) __attribute__((noreturn));
void put(struct buffer *b, char c);
struct node *new_scalar(struct buffer b, int plain);

char cur(struct parser *p);
int column(struct parser *p);
int blank(char c);
int ends(char c);                   /* end of line or text */
int gap(char c);                    /* blank, or ends */
void skip_spaces(struct parser *p);
void next_line(struct parser *p);
int at_marker(struct parser *p, const char *mark);
void end_of_line(struct parser *p); /* fails if anything but a comment follows */

/* yaml_scalar.c; `parent` is the column that continuation lines must exceed. */
struct node *quoted(struct parser *p);
struct node *plain(struct parser *p, int parent);
struct node *block_scalar(struct parser *p, int parent);
int plain_stop(struct parser *p, int flow);
void plain_line(struct parser *p, struct buffer *b, int flow);
#endif
