/*
 * grow DISK PARTITION MOUNT: lets the last partition of an MBR disk, and the mounted ext4 in it,
 * take the rest of the disk. Works on the running system: the kernel does both steps.
 */
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define SECTOR 512
#define BLOCK 4096                              /* of the ext4, as made by the build script */
#define RESIZE_EXT4 _IOW('f', 16, uint64_t)     /* EXT4_IOC_RESIZE_FS, in no installed header */

static int failed(const char *what)
{
    perror(what);
    return 1;
}

int main(int argc, char **argv)
{
    struct { unsigned char flag[8]; uint32_t start, size; } entry;
    uint64_t bytes, sectors, blocks;

    if (argc != 4)
        return fprintf(stderr, "usage: grow DISK PARTITION MOUNT\n"), 2;
    int number = atoi(argv[2]), disk = open(argv[1], O_RDWR), root = open(argv[3], O_RDONLY);
    off_t at = 446 + 16 * (number - 1);
    if (disk < 0 || root < 0 || number < 1 || number > 4)
        return failed("grow");
    if (ioctl(disk, BLKGETSIZE64, &bytes) || pread(disk, &entry, sizeof entry, at) != sizeof entry)
        return failed(argv[1]);

    sectors = bytes / SECTOR - entry.start;
    if (sectors > UINT32_MAX)
        sectors = UINT32_MAX;                   /* 2 TiB is the end of an MBR */
    sectors -= sectors % (BLOCK / SECTOR);
    if (sectors > entry.size) {
        struct blkpg_partition part = {.start = (long long)entry.start * SECTOR, .length = sectors * SECTOR, .pno = number};
        struct blkpg_ioctl_arg arg = {.op = BLKPG_RESIZE_PARTITION, .datalen = sizeof part, .data = &part};
        if (ioctl(disk, BLKPG, &arg))
            return failed("resize partition");
        entry.size = sectors;
        if (pwrite(disk, &entry, sizeof entry, at) != sizeof entry || fsync(disk))
            return failed("write partition table");
    }
    blocks = (uint64_t)entry.size * SECTOR / BLOCK;
    if (ioctl(root, RESIZE_EXT4, &blocks))
        return failed("resize ext4");
    return 0;
}
