/*
 * seed IN OUT: reads a cloud-init NoCloud seed (IN/meta-data, user-data, vendor-data, network-config) and
 * leaves in OUT what shell scripts can act on without parsing:
 *
 *   instance-id, hostname, authorized_keys     one value each, or one per line
 *   bootcmd, runcmd, script                    programs for sh, or the #! file as it is
 *   files/list                                 N <tab> mode <tab> owner <tab> append|write <tab> gzip|plain <tab> path
 *   files/N                                    the content, base64 already undone
 *   net/N                                      one NIC: `mac M`, `name N`, `dhcp`, `addr A/P`, `route TO VIA METRIC`,
 *                                              `dns A`, `search D`, `mtu N`
 *   notes                                      what was not understood or is not supported, for the console
 *
 * A part that cannot be read is noted and the others still count: a guest whose user-data has
 * a typing mistake must still come up with its network.
 */
#include "yaml.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char *in_dir, *out_dir;

static FILE *output(const char *name, const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", out_dir, name);
    FILE *f = fopen(path, mode);
    if (!f) {
        perror(path);
        exit(1);
    }
    return f;
}

static void write_line(const char *name, const char *text)
{
    FILE *f = output(name, "w");
    fprintf(f, "%s\n", text);
    fclose(f);
}

static void note(const char *format, ...)
{
    va_list args;
    FILE *f = output("notes", "a");
    va_start(args, format);
    vfprintf(f, format, args);
    va_end(args);
    fputc('\n', f);
    fclose(f);
}

static char *input(const char *name, size_t *len)
{
    char path[4096], *text = NULL;
    size_t room = 0, got;
    snprintf(path, sizeof path, "%s/%s", in_dir, name);
    FILE *f = fopen(path, "r");
    if (!f)
        return NULL;
    *len = 0;
    do {
        if (!(text = realloc(text, room = room * 2 + 65536)))
            abort();
        *len += got = fread(text + *len, 1, room - *len - 1, f);
    } while (got);
    text[*len] = 0;
    fclose(f);
    return text;
}

static struct node *parsed(const char *name, const char *text, size_t len)
{
    char error[200];
    struct node *n = yaml_parse(text, len, error, sizeof error);
    if (!n)
        note("%s: %s", name, error);
    else if (n->kind != MAP && n->kind != SCALAR)
        note("%s: not a mapping", name);
    return n;
}

/* A scalar, a list of them, or a list of lines in one string, wherever they are below n. */
static void each_scalar(const struct node *n, void (*use)(const char *, void *), void *arg)
{
    if (!n)
        return;
    for (size_t i = 0; i < n->count; i++)
        each_scalar(n->items[i], use, arg);
    if (n->kind == SCALAR) {
        char *copy = strdup(n->text), *rest = copy, *word;
        while ((word = strsep(&rest, "\n")))
            if (*word)
                use(word, arg);
        free(copy);
    }
}

static void add_key(const char *key, void *file) { fprintf(file, "%s\n", key); }

static int known(const char *word, const char *const *list)
{
    while (*list && strcmp(*list, word))
        list++;
    return *list != NULL;
}

/* ---- commands ---- */

static void shell_quoted(FILE *f, const char *text)
{
    fputc('\'', f);
    for (; *text; text++)
        if (*text == '\'')
            fputs("'\\''", f);
        else
            fputc(*text, f);
    fputc('\'', f);
}

static void commands(const struct node *list, const char *name)
{
    if (!list)
        return;
    if (list->kind != SEQ) {
        note("user-data: %s is not a list", name);
        return;
    }
    FILE *f = output(name, "w");
    fputs("#!/bin/sh\n", f);
    for (size_t i = 0; i < list->count; i++) {
        struct node *c = list->items[i];
        if (c->kind == SCALAR)
            fprintf(f, "%s\n", c->text);
        else if (c->kind == SEQ) {
            for (size_t j = 0; j < c->count; j++) {
                if (c->items[j]->kind != SCALAR)
                    continue;
                shell_quoted(f, c->items[j]->text);
                fputc(' ', f);
            }
            fputc('\n', f);
        } else
            note("user-data: %s entry %zu is a mapping (a `: ` without quotes?)", name, i + 1);
    }
    fclose(f);
}

/* ---- write_files ---- */

static int digit64(char c)
{
    static const char all[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *p = c ? strchr(all, c) : NULL;
    return p ? (int)(p - all) : -1;
}

static void put_base64(FILE *f, const char *text)
{
    unsigned bits = 0, have = 0;
    for (; *text && *text != '='; text++) {
        int d = digit64(*text);
        if (d < 0)
            continue;                           /* line breaks */
        bits = bits << 6 | (unsigned)d;
        if ((have += 6) >= 8)
            fputc(bits >> (have -= 8) & 0xff, f);
    }
}

static void write_files(const struct node *list)
{
    static const char *const encodings[] = {"", "text", "text/plain", "b64", "base64", "gz", "gzip",
        "gz+b64", "gz+base64", "gzip+b64", "gzip+base64", NULL};
    if (!list)
        return;
    if (list->kind != SEQ) {
        note("user-data: write_files is not a list");
        return;
    }
    FILE *index = output("files/list", "w");
    for (size_t i = 0; i < list->count; i++) {
        struct node *file = list->items[i], *content = yaml_get(file, "content");
        const char *path = yaml_text(file, "path"), *mode = yaml_text(file, "permissions");
        const char *owner = yaml_text(file, "owner"), *encoding = yaml_text(file, "encoding");
        char name[40];
        if (!path || *path != '/' || strpbrk(path, "\t\n")) {
            note("user-data: write_files entry %zu has no usable path", i + 1);
            continue;
        }
        if (!encoding)
            encoding = "";
        if (!known(encoding, encodings))
            note("user-data: %s: unknown encoding %s, written as it is", path, encoding);
        if (mode && !strncmp(mode, "0o", 2))
            mode += 2;
        if (mode && strspn(mode, "01234567") != strlen(mode)) {
            note("user-data: %s: permissions %s are not octal", path, mode);
            mode = NULL;
        }
        snprintf(name, sizeof name, "files/%zu", i);
        FILE *f = output(name, "w");
        if (content && content->kind == SCALAR) {
            if (content->binary || strstr(encoding, "64"))
                put_base64(f, content->text);
            else
                fwrite(content->text, 1, content->len, f);
        }
        fclose(f);
        fprintf(index, "%zu\t%s\t%s\t%s\t%s\t%s\n", i, mode && *mode ? mode : "0644", owner && *owner ? owner : "root:root",
                yaml_true(file, "append") ? "append" : "write", !strncmp(encoding, "gz", 2) ? "gzip" : "plain", path);
    }
    fclose(index);
}

/* ---- the three parts ---- */

int find_seed(void);                            /* find.c */
void network(const struct node *config);        /* network.c */
FILE *network_file(int number)
{
    char name[40];
    snprintf(name, sizeof name, "net/%d", number);
    return output(name, "w");
}

static void keys_of_users(const struct node *users, FILE *keys)
{
    for (size_t i = 0; users && users->kind == SEQ && i < users->count; i++) {
        struct node *user = users->items[i];
        const char *name = yaml_text(user, "name");
        if (!name)
            continue;                           /* the word `default` */
        if (strcmp(name, "root") && strcmp(name, "default"))
            note("user-data: user %s: this guest has only root", name);
        else {
            each_scalar(yaml_get(user, "ssh_authorized_keys"), add_key, keys);
            each_scalar(yaml_get(user, "ssh-authorized-keys"), add_key, keys);
        }
    }
}

static void cloud_config(const struct node *config, const char **hostname, FILE *keys)
{
    static const char *const honoured[] = {"hostname", "fqdn", "ssh_authorized_keys", "users", "write_files", "runcmd", "bootcmd",
        "preserve_hostname", "prefer_fqdn_over_hostname", "manage_etc_hosts", "ssh_pwauth", "disable_root",
        "create_hostname_file", "growpart", "resize_rootfs", "final_message", NULL};
    if (yaml_text(config, "hostname"))
        *hostname = yaml_text(config, "hostname");
    else if (yaml_text(config, "fqdn"))
        *hostname = yaml_text(config, "fqdn");
    each_scalar(yaml_get(config, "ssh_authorized_keys"), add_key, keys);
    keys_of_users(yaml_get(config, "users"), keys);
    write_files(yaml_get(config, "write_files"));
    commands(yaml_get(config, "bootcmd"), "bootcmd");
    commands(yaml_get(config, "runcmd"), "runcmd");
    for (size_t i = 0; config->kind == MAP && i < config->count; i++) {
        if (!known(config->keys[i], honoured))
            note("user-data: %s is not supported, ignored", config->keys[i]);
    }
}

int main(int argc, char **argv)
{
    static const char *dirs[] = {"", "files", "net"};
    const char *hostname = NULL, *id;
    char path[4096], *text;
    struct node *n;
    size_t len;

    if (argc == 2 && !strcmp(argv[1], "find"))
        return find_seed();
    if (argc != 3) {
        fprintf(stderr, "usage: seed find | seed IN OUT\n");
        return 2;
    }
    in_dir = argv[1];
    out_dir = argv[2];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", out_dir, dirs[i]);
        mkdir(path, 0700);
    }
    FILE *keys = output("authorized_keys", "w");

    if ((text = input("meta-data", &len)) && (n = parsed("meta-data", text, len))) {
        if ((id = yaml_text(n, "instance-id")) || (id = yaml_text(n, "instance_id")))
            write_line("instance-id", id);
        if (!(hostname = yaml_text(n, "local-hostname")))
            hostname = yaml_text(n, "hostname");
        each_scalar(yaml_get(n, "public-keys"), add_key, keys);
    }
    if ((text = input("user-data", &len)) && len) {
        if (!strncmp(text, "#cloud-config", 13)) {
            if ((n = parsed("user-data", text, len)))
                cloud_config(n, &hostname, keys);
        } else if (!strncmp(text, "#!", 2)) {
            FILE *f = output("script", "w");
            fwrite(text, 1, len, f);
            fclose(f);
            /* only a script leaves cloud-init's vendor data as it is */
            if ((text = input("vendor-data", &len)) && !strncmp(text, "#cloud-config", 13)
                && (n = parsed("vendor-data", text, len)))
                cloud_config(n, &hostname, keys);
        } else if (strspn(text, " \n") != len)
            note("user-data: starts neither with #cloud-config nor with #!, ignored");
    }
    if ((text = input("network-config", &len)) && (n = parsed("network-config", text, len)))
        network(n);
    if (hostname && *hostname)
        write_line("hostname", hostname);
    fclose(keys);
    return 0;
}
