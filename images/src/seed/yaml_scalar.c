/* Scalars of all five styles: plain, single and double quoted, literal and folded blocks. */
#include "yaml_parser.h"

#include <stdlib.h>
#include <string.h>


static void put_utf8(struct buffer *b, unsigned long u)
{
    if (u < 0x80) {
        put(b, u);
        return;
    }
    if (u < 0x800)
        put(b, 0xc0 | u >> 6);
    else {
        if (u < 0x10000)
            put(b, 0xe0 | u >> 12);
        else {
            put(b, 0xf0 | u >> 18);
            put(b, 0x80 | (u >> 12 & 0x3f));
        }
        put(b, 0x80 | (u >> 6 & 0x3f));
    }
    put(b, 0x80 | (u & 0x3f));
}

static unsigned long hex(struct parser *p, int digits)
{
    char text[9] = {0};
    for (int i = 0; i < digits; i++) {
        if (!strchr("0123456789abcdefABCDEF", cur(p)) || !cur(p))
            fail(p, "bad hexadecimal escape");
        text[i] = p->s[p->at++];
    }
    return strtoul(text, NULL, 16);
}

static void escape(struct parser *p, struct buffer *b)
{
    static const char from[] = "0abt\tnvfre \"/\\N_", to[] = "\0\a\b\t\t\n\v\f\r\033 \"/\\\x85\xa0";
    char c = cur(p);
    const char *known = c ? strchr(from, c) : NULL;
    p->at++;
    if (known)
        put_utf8(b, (unsigned char)to[known - from]);
    else if (c == 'x' || c == 'u' || c == 'U') {
        unsigned long u = hex(p, c == 'x' ? 2 : c == 'u' ? 4 : 8);
        if (u >= 0xd800 && u < 0xdc00 && cur(p) == '\\' && p->s[p->at + 1] == 'u') {
            p->at += 2;                         /* JSON writes large characters as two halves */
            u = 0x10000 + ((u - 0xd800) << 10) + (hex(p, 4) & 0x3ff);
        }
        put_utf8(b, u);
    } else
        fail(p, "unknown escape in a double-quoted string");
}

/* One line break inside a scalar is a space, n blank lines are n line breaks. */
static void fold(struct parser *p, struct buffer *b)
{
    int breaks = 0;
    while (cur(p) == '\n') {
        next_line(p);
        skip_spaces(p);
        breaks++;
    }
    if (breaks == 1)
        put(b, ' ');
    while (--breaks > 0)
        put(b, '\n');
}

struct node *quoted(struct parser *p)
{
    struct buffer b = {0};
    char quote = p->s[p->at++], c;
    size_t kept = 0;                            /* spaces up to here were escaped: not trimmed */
    while ((c = cur(p)) != quote || (quote == '\'' && p->s[p->at + 1] == '\'')) {
        if (!c)
            fail(p, "a quoted string does not end");
        if (c == '\n') {
            while (b.len > kept && blank(b.text[b.len - 1]))
                b.len--;
            fold(p, &b);
        } else if (c == '\\' && quote == '"') {
            p->at++;
            if (cur(p) == '\n') {               /* escaped line end: joined without a space */
                next_line(p);
                skip_spaces(p);
                for (; cur(p) == '\n'; skip_spaces(p)) {
                    put(&b, '\n');
                    next_line(p);
                }
            } else
                escape(p, &b);
            kept = b.len;
        } else {
            p->at += c == '\'' && quote == '\'' ? 2 : 1;
            put(&b, c);
        }
    }
    p->at++;
    return new_scalar(b, 0);
}

/* Does a plain scalar stop here? */
int plain_stop(struct parser *p, int flow)
{
    char c = cur(p), next = c ? p->s[p->at + 1] : 0;
    if (ends(c) || (c == '#' && p->at > p->start && blank(p->s[p->at - 1])))
        return 1;
    if (c == ':' && (gap(next) || (flow && strchr(",[]{}", next))))
        return 1;
    return flow && strchr(",[]{}", c) != NULL;
}

void plain_line(struct parser *p, struct buffer *b, int flow)
{
    while (!plain_stop(p, flow)) {
        put(b, cur(p));
        p->at++;
    }
    while (b->len && blank(b->text[b->len - 1]))
        b->text[--b->len] = 0;
}

/* A plain scalar goes on over lines indented more than `parent`. */
struct node *plain(struct parser *p, int parent)
{
    struct buffer b = {0};
    if (strchr("@`%&*!|>,]}", cur(p)) || ((cur(p) == '?' || cur(p) == '-') && gap(p->s[p->at + 1])))
        fail(p, "unsupported or misplaced character (missing quotes?)");
    plain_line(p, &b, 0);
    while (cur(p) == '\n') {
        struct parser before = *p;
        int breaks = 0;
        while (cur(p) == '\n') {
            next_line(p);
            while (cur(p) == ' ')
                p->at++;
            breaks++;
        }
        if (!cur(p) || cur(p) == '#' || column(p) <= parent || at_marker(p, "---") || at_marker(p, "...")) {
            p->at = before.at, p->start = before.start, p->line = before.line;
            break;
        }
        if (breaks == 1)
            put(&b, ' ');
        while (--breaks > 0)
            put(&b, '\n');
        plain_line(p, &b, 0);
    }
    end_of_line(p);
    return new_scalar(b, 1);
}

/* `|` and `>`, with the optional indentation digit and chomping sign. */
struct node *block_scalar(struct parser *p, int parent)
{
    struct buffer b = {0};
    int folded = p->s[p->at++] == '>', indent = -1, pending = 0, was_more = 1;
    char chomp = 0;
    for (; cur(p) == '-' || cur(p) == '+' || (cur(p) >= '1' && cur(p) <= '9'); p->at++)
        if (cur(p) == '-' || cur(p) == '+')
            chomp = cur(p);
        else
            indent = (parent < 0 ? 0 : parent) + cur(p) - '0';
    end_of_line(p);
    for (next_line(p); cur(p); next_line(p)) {
        while (cur(p) == ' ' && (indent < 0 || column(p) < indent))
            p->at++;
        if (cur(p) == '\n') {
            pending++;
            continue;
        }
        if (!cur(p) || column(p) <= parent || (indent >= 0 && column(p) < indent)
            || at_marker(p, "---") || at_marker(p, "..."))
            break;
        if (indent < 0)
            indent = column(p);
        int more = blank(cur(p));               /* folding leaves more-indented lines alone */
        int first = b.len == 0;
        if (folded && !more && !was_more && !first) {
            if (!pending)
                put(&b, ' ');
        } else if (!first)
            put(&b, '\n');
        for (; pending > 0; pending--)
            put(&b, '\n');
        while (!ends(cur(p))) {
            put(&b, cur(p));
            p->at++;
        }
        was_more = more;
    }
    p->at = p->start;                           /* the line that ended it is read again by its owner */
    if (b.len && chomp != '-' && (cur(p) || !p->unfinished || pending))
        put(&b, '\n');
    for (; chomp == '+' && pending > 0; pending--)
        put(&b, '\n');
    return new_scalar(b, 0);
}
