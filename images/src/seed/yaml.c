/*
 * Recursive descent over the characters; a block belongs to the column of its first character.
 * Not supported, and refused aloud rather than misread: anchors, aliases, `? ` keys, tabs as
 * indentation, flow collections as keys, several documents. Memory is never freed: the one
 * program using this reads three small files and ends.
 */
#include "yaml_parser.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

void fail(struct parser *p, const char *what)
{
    snprintf(p->error, p->error_size, "line %d: %s", p->line, what);
    longjmp(p->failed, 1);
}

static void *grown(void *old, size_t size)
{
    void *new = realloc(old, size);
    if (!new)
        abort();
    return new;
}

void put(struct buffer *b, char c)
{
    if (b->len + 1 >= b->room)
        b->text = grown(b->text, b->room = b->room * 2 + 64);
    b->text[b->len++] = c;
    b->text[b->len] = 0;
}

static struct node *new_node(enum kind kind)
{
    struct node *n = grown(NULL, sizeof *n);
    memset(n, 0, sizeof *n);
    n->kind = kind;
    return n;
}

struct node *new_scalar(struct buffer b, int plain)
{
    struct node *n = new_node(SCALAR);
    n->text = b.text ? b.text : calloc(1, 1);
    n->len = b.len;
    n->plain = plain;
    return n;
}

static struct node *null_node(void) { return new_scalar((struct buffer){0}, 1); }

static void add(struct node *n, char *key, struct node *item)
{
    for (size_t i = 0; key && i < n->count; i++)
        if (!strcmp(n->keys[i], key)) {         /* like cloud-init's reader: the last one counts */
            n->items[i] = item;
            return;
        }
    n->items = grown(n->items, (n->count + 1) * sizeof *n->items);
    n->keys = grown(n->keys, (n->count + 1) * sizeof *n->keys);
    n->items[n->count] = item;
    n->keys[n->count++] = key;
}

/* ---- moving about ---- */

char cur(struct parser *p) { return p->s[p->at]; }
int column(struct parser *p) { return (int)(p->at - p->start); }
int blank(char c) { return c == ' ' || c == '\t'; }
int ends(char c) { return c == 0 || c == '\n'; }
int gap(char c) { return blank(c) || ends(c); }
void skip_spaces(struct parser *p) { while (blank(cur(p))) p->at++; }

void next_line(struct parser *p)
{
    while (!ends(cur(p)))
        p->at++;
    if (cur(p)) {
        p->start = ++p->at;
        p->line++;
    }
}

int at_marker(struct parser *p, const char *mark)
{
    return p->at == p->start && !strncmp(p->s + p->at, mark, 3) && gap(p->s[p->at + 3]);
}

/* To the next thing that is neither space nor comment; returns its column, -1 at the end. */
static int skip_to_content(struct parser *p)
{
    for (;;) {
        int indented = p->at == p->start;
        while (cur(p) == ' ')
            p->at++;
        if (cur(p) == '\t') {
            skip_spaces(p);
            if (indented && !ends(cur(p)) && cur(p) != '#')
                fail(p, "a tab is used as indentation");
        }
        if (cur(p) == '#' && (p->at == p->start || gap(p->s[p->at - 1])))
            while (!ends(cur(p)))
                p->at++;
        if (cur(p) == 0 || at_marker(p, "---") || at_marker(p, "..."))
            return -1;
        if (cur(p) != '\n')
            return column(p);
        next_line(p);
    }
}

/* Nothing but a comment may follow a finished value on its line. */
void end_of_line(struct parser *p)
{
    skip_spaces(p);
    if (!ends(cur(p)) && cur(p) != '#')
        fail(p, "text after the end of a value (missing quotes?)");
}

/* ---- collections ---- */

static struct node *flow(struct parser *p)
{
    struct buffer b = {0};
    char open = cur(p), close = open == '[' ? ']' : '}';

    if (++p->depth > 100)
        fail(p, "nested too deeply");
    if (open == '"' || open == '\'') {
        p->depth--;
        return quoted(p);
    }
    if (open != '[' && open != '{') {
        if (strchr("&*!|>%@`", open))
            fail(p, "unsupported character in [ ] or { } (missing quotes?)");
        plain_line(p, &b, 1);
        p->depth--;
        return new_scalar(b, 1);
    }
    struct node *n = new_node(open == '[' ? SEQ : MAP);
    p->at++;
    for (;;) {
        if (skip_to_content(p) < 0)
            fail(p, "[ or { is never closed");
        if (cur(p) == close)
            break;
        struct node *item = flow(p);
        if (skip_to_content(p) < 0)
            fail(p, "[ or { is never closed");
        if (n->kind == MAP) {
            struct node *value = null_node();
            if (item->kind != SCALAR)
                fail(p, "a key must be a word");
            if (cur(p) == ':') {
                p->at++;
                if (skip_to_content(p) < 0)
                    fail(p, "{ is never closed");
                if (cur(p) != ',' && cur(p) != close)
                    value = flow(p);
                skip_to_content(p);
            }
            add(n, item->text, value);
        } else
            add(n, NULL, item);
        if (cur(p) == ',')
            p->at++;
        else if (cur(p) != close)
            fail(p, "expected , or the closing bracket");
    }
    p->at++;
    p->depth--;
    return n;
}

/* Is there a `key:` at the cursor? Looks ahead on this line only. */
static int at_key(struct parser *p)
{
    struct parser look = *p;
    if (cur(p) == '"' || cur(p) == '\'') {
        char quote = cur(p);
        for (look.at++; cur(&look) != quote; look.at++) {
            if (cur(&look) == '\\' && quote == '"')
                look.at++;
            if (ends(cur(&look)))
                return 0;
        }
        look.at++;
        skip_spaces(&look);
        return cur(&look) == ':' && gap(look.s[look.at + 1]);
    }
    if (strchr("[{|>#", cur(p)))
        return 0;
    while (!plain_stop(&look, 0))
        look.at++;
    return cur(&look) == ':';
}

static int at_item(struct parser *p) { return cur(p) == '-' && gap(p->s[p->at + 1]); }

static struct node *block(struct parser *p, int parent);

/* What follows `key:` or `- ` on the same line or below; `parent` is the column of those. */
static struct node *value(struct parser *p, int parent, int is_item)
{
    struct node *n;
    int binary = 0;

    skip_spaces(p);
    if (cur(p) == '!') {                        /* a tag: only !!binary changes anything here */
        binary = !strncmp(p->s + p->at, "!!binary", 8);
        while (!gap(cur(p)))
            p->at++;
        skip_spaces(p);
    }
    if (ends(cur(p)) || cur(p) == '#') {
        int col = skip_to_content(p);
        if (col > parent || (col == parent && !is_item && at_item(p)))
            n = block(p, col > parent ? parent : parent - 1);
        else
            n = null_node();
    } else if (is_item)
        n = block(p, parent);
    else if (at_key(p) || at_item(p))
        fail(p, "`: ` or `- ` inside a value (missing quotes?)");
    else
        n = block(p, parent);
    n->binary = binary;
    return n;
}

/* A node whose first character is at the cursor. */
static struct node *block(struct parser *p, int parent)
{
    struct node *n;
    int col = column(p);

    if (++p->depth > 100)
        fail(p, "nested too deeply");
    if (at_item(p) || at_key(p)) {
        n = new_node(at_item(p) ? SEQ : MAP);
        do {
            if (n->kind == SEQ) {
                if (!at_item(p))
                    break;
                p->at++;
                add(n, NULL, value(p, col, 1));
            } else {
                struct buffer key = {0};
                if (at_item(p) || !at_key(p))
                    fail(p, "expected `key: value`");
                if (cur(p) == '"' || cur(p) == '\'') {
                    struct node *k = quoted(p);
                    key = (struct buffer){k->text, k->len, 0};
                } else
                    plain_line(p, &key, 0);
                skip_spaces(p);
                p->at++;                        /* the colon */
                add(n, key.text ? key.text : "", value(p, col, 0));
            }
        } while (skip_to_content(p) == col);
        if (skip_to_content(p) > col)
            fail(p, "indented more than its neighbours");
    } else if (cur(p) == '|' || cur(p) == '>')
        n = block_scalar(p, parent);
    else if (strchr("[{\"'", cur(p))) {
        n = flow(p);
        end_of_line(p);
    } else
        n = plain(p, parent);
    p->depth--;
    return n;
}

struct node *yaml_parse(const char *text, size_t len, char *error, size_t error_size)
{
    struct parser p = {.line = 1, .error = error, .error_size = error_size};
    struct buffer b = {0};
    struct node *n;

    if (len >= 3 && !memcmp(text, "\xef\xbb\xbf", 3))
        text += 3, len -= 3;
    for (size_t i = 0; i < len; i++)
        if (!text[i])
            break;
        else if (text[i] != '\r' || i + 1 == len || text[i + 1] != '\n')
            put(&b, text[i]);
    p.unfinished = !b.len || b.text[b.len - 1] != '\n';
    if (p.unfinished)
        put(&b, '\n');
    p.s = b.text;
    if (setjmp(p.failed))
        return NULL;
    if (skip_to_content(&p) < 0 && at_marker(&p, "---")) {
        p.at += 3;
        skip_spaces(&p);
    }
    if (skip_to_content(&p) < 0)
        return null_node();
    n = block(&p, -1);
    if (skip_to_content(&p) >= 0)
        fail(&p, "text after the end of the document (wrong indentation?)");
    if (at_marker(&p, "---"))
        fail(&p, "more than one document");
    return n;
}

/* ---- reading the tree ---- */

static int is_null(const struct node *n)
{
    return n->kind == SCALAR && n->plain
        && (!*n->text || !strcmp(n->text, "~") || !strcmp(n->text, "null")
            || !strcmp(n->text, "Null") || !strcmp(n->text, "NULL"));
}

struct node *yaml_get(const struct node *map, const char *key)
{
    if (map && map->kind == MAP)
        for (size_t i = 0; i < map->count; i++)
            if (!strcmp(map->keys[i], key))
                return is_null(map->items[i]) ? NULL : map->items[i];
    return NULL;
}

const char *yaml_text(const struct node *map, const char *key)
{
    struct node *n = yaml_get(map, key);
    return n && n->kind == SCALAR ? n->text : NULL;
}

int yaml_true(const struct node *map, const char *key)
{
    const char *t = yaml_text(map, key);
    return t && (!strcasecmp(t, "true") || !strcasecmp(t, "yes") || !strcasecmp(t, "on"));
}
