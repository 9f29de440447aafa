/*
 * seed find: prints the block device whose file system is labelled cidata, in either case.
 * busybox's findfs does not see the label of an ISO on a disk.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* Where a label is written, what must stand elsewhere for it to be one, and its length. */
static const struct { off_t label, magic_at; const char *magic; size_t len; } places[] = {
    {32808, 32769, "CD001", 32},        /* ISO 9660: primary volume descriptor at 32 KiB */
    {43, 54, "FAT", 11},                /* FAT12, FAT16 */
    {71, 82, "FAT32", 11},
};

static int is_seed(const char *path)
{
    int fd = open(path, O_RDONLY), found = 0;
    for (size_t i = 0; fd >= 0 && !found && i < sizeof places / sizeof *places; i++) {
        char text[33] = {0}, magic[8] = {0};
        size_t len = places[i].len;
        if (pread(fd, text, len, places[i].label) != (ssize_t)len
            || pread(fd, magic, strlen(places[i].magic), places[i].magic_at) < 0)
            continue;
        while (len && (text[len - 1] == ' ' || !text[len - 1]))
            text[--len] = 0;
        found = !strcmp(magic, places[i].magic) && !strcasecmp(text, "cidata");
    }
    if (fd >= 0)
        close(fd);
    return found;
}

int find_seed(void)
{
    DIR *all = opendir("/sys/class/block");
    struct dirent *entry;
    while (all && (entry = readdir(all))) {
        char path[300];
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        if (is_seed(path))
            return puts(path) < 0;
    }
    return 1;
}
