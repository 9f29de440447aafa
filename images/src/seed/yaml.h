/* A tree for the part of YAML that people write in cloud-init seeds (JSON included). */
#ifndef YAML_H
#define YAML_H
#include <stddef.h>

enum kind { SCALAR, SEQ, MAP };

struct node {
    enum kind kind;
    char *text;         /* SCALAR: NUL-terminated; may also hold NULs, see len */
    size_t len;
    int plain;          /* SCALAR: written without quotes, so `~`, `null` and `true` are not strings */
    int binary;         /* SCALAR: tagged !!binary, text is still base64 */
    size_t count;       /* SEQ, MAP */
    char **keys;        /* MAP */
    struct node **items;
};

/* Parses one document. On a mistake returns NULL and leaves "line N: what" in error. */
struct node *yaml_parse(const char *text, size_t len, char *error, size_t error_size);

struct node *yaml_get(const struct node *map, const char *key); /* NULL if absent, null, or no map */
const char *yaml_text(const struct node *map, const char *key); /* NULL unless a scalar */
int yaml_true(const struct node *map, const char *key);
#endif
