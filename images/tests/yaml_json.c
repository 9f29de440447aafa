/* Test helper: YAML on stdin, the tree as JSON (all scalars strings) on stdout, mistakes on stderr. */
#include "../src/seed/yaml.h"

#include <stdio.h>

static void print_string(const char *text, size_t len)
{
    putchar('"');
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] < 32 || text[i] == '"' || text[i] == '\\')
            printf("\\u%04x", text[i]);
        else
            putchar(text[i]);
    putchar('"');
}

static void print(const struct node *n)
{
    if (n->kind == SCALAR) {
        print_string(n->text, n->len);
        return;
    }
    putchar(n->kind == SEQ ? '[' : '{');
    for (size_t i = 0; i < n->count; i++) {
        if (i)
            putchar(',');
        if (n->kind == MAP) {
            const char *end = n->keys[i];
            while (*end)
                end++;
            print_string(n->keys[i], (size_t)(end - n->keys[i]));
            putchar(':');
        }
        print(n->items[i]);
    }
    putchar(n->kind == SEQ ? ']' : '}');
}

int main(void)
{
    static char text[1 << 20];
    char error[200];
    struct node *n = yaml_parse(text, fread(text, 1, sizeof text, stdin), error, sizeof error);
    if (!n)
        return fprintf(stderr, "%s\n", error), 1;
    print(n);
    return 0;
}
