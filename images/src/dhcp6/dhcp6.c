/*
 * dhcp6 IF SCRIPT: asks for IPv6 addresses by DHCPv6 (RFC 8415), without end, and calls
 *
 *   SCRIPT IF LEASE_S ADDRESS...
 *
 * for each answer that has addresses. Routes come from the kernel, which reads router
 * advertisements. Asks with a rapid commit, so one answer suffices; after half of the lease it asks
 * again in the same way, and gets the same addresses.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SOLICIT = 1, REPLY = 7, CLIENT_ID = 1, IA_NA = 3, IA_ADDRESS = 5, RAPID_COMMIT = 14 };
enum { MOST_ADDRESSES = 8, LONGEST_WAIT_S = 60 };

static unsigned char mac[6], transaction[3];

static unsigned number(const unsigned char *at, int bytes)
{
    unsigned found = 0;
    while (bytes--)
        found = found << 8 | *at++;
    return found;
}

static unsigned char *put(unsigned char *at, int code, const void *value, int length)
{
    *at++ = code >> 8, *at++ = code, *at++ = length >> 8, *at++ = length;
    memcpy(at, value, length);
    return at + length;
}

/* The DUID is made of the MAC, so that it is the same at each boot. */
static int solicitation(unsigned char *message)
{
    unsigned char duid[10] = {0, 3, 0, 1}, ia[12] = {0, 0, 0, 1}, *at = message;
    memcpy(duid + 4, mac, sizeof mac);
    *at++ = SOLICIT;
    memcpy(at, transaction, sizeof transaction);
    at = put(at + sizeof transaction, CLIENT_ID, duid, sizeof duid);
    at = put(at, RAPID_COMMIT, "", 0);
    at = put(at, IA_NA, ia, sizeof ia);
    return at - message;
}

/* Calls `use` for each option; stops at a truncated one. */
static void each_option(const unsigned char *at, int length,
                        void (*use)(int, const unsigned char *, int, void *), void *arg)
{
    while (length >= 4) {
        int code = number(at, 2), size = number(at + 2, 2);
        if (size > length - 4)
            return;
        use(code, at + 4, size, arg);
        at += 4 + size, length -= 4 + size;
    }
}

struct lease {
    unsigned seconds;
    int count;
    char addresses[MOST_ADDRESSES][INET6_ADDRSTRLEN];
};

static void in_ia(int code, const unsigned char *value, int length, void *arg)
{
    struct lease *lease = arg;
    if (code != IA_ADDRESS || length < 24 || lease->count == MOST_ADDRESSES || !number(value + 20, 4))
        return;
    inet_ntop(AF_INET6, value, lease->addresses[lease->count++], INET6_ADDRSTRLEN);
    lease->seconds = number(value + 20, 4);
}

static void in_reply(int code, const unsigned char *value, int length, void *arg)
{
    if (code == IA_NA && length >= 12)
        each_option(value + 12, length - 12, in_ia, arg);
}

static int opened(const char *name)
{
    struct sockaddr_in6 own = {.sin6_family = AF_INET6, .sin6_port = htons(546)};
    int fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, name, strlen(name));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&own, sizeof own)) {
        perror("dhcp6: bind");
        exit(1);
    }
    return fd;
}

static void tell(const char *script, char *name, struct lease *lease)
{
    char seconds[16], *words[MOST_ADDRESSES + 4] = {(char *)script, name, seconds};
    snprintf(seconds, sizeof seconds, "%u", lease->seconds);
    for (int i = 0; i < lease->count; i++)
        words[3 + i] = lease->addresses[i];
    pid_t child = fork();
    if (child == 0) {
        execv(script, words);
        _exit(127);
    }
    if (child > 0)
        waitpid(child, NULL, 0);
}

static time_t now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec;
}

/* One attempt: sends, and reads until an answer or the deadline. */
static int asked(int fd, const struct sockaddr_in6 *servers, int wait_s, struct lease *lease)
{
    unsigned char message[1500];
    int size = solicitation(message);
    time_t until = now() + wait_s;
    sendto(fd, message, size, 0, (const struct sockaddr *)servers, sizeof *servers);   /* fails before DAD ends */
    while (now() < until) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, 200) <= 0)
            continue;
        size = recv(fd, message, sizeof message, 0);
        if (size < 4 || message[0] != REPLY || memcmp(message + 1, transaction, sizeof transaction))
            continue;
        memset(lease, 0, sizeof *lease);
        each_option(message + 4, size - 4, in_reply, lease);
        if (lease->count)
            return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: dhcp6 IF SCRIPT\n");
        return 2;
    }
    struct ifreq card = {0};
    struct sockaddr_in6 servers = {.sin6_family = AF_INET6, .sin6_port = htons(547)};
    int fd = opened(argv[1]), wait_s = 1;
    strncpy(card.ifr_name, argv[1], IFNAMSIZ - 1);
    ioctl(fd, SIOCGIFHWADDR, &card);
    memcpy(mac, card.ifr_hwaddr.sa_data, sizeof mac);
    inet_pton(AF_INET6, "ff02::1:2", &servers.sin6_addr);
    servers.sin6_scope_id = if_nametoindex(argv[1]);
    srand(getpid() ^ time(NULL) ^ number(mac + 2, 4));
    for (;;) {
        struct lease lease;
        for (size_t i = 0; i < sizeof transaction; i++)
            transaction[i] = rand() >> 8;
        if (asked(fd, &servers, wait_s, &lease)) {
            tell(argv[2], argv[1], &lease);
            sleep(lease.seconds / 2 > 1 ? lease.seconds / 2 : 1);
            wait_s = 1;
        } else if ((wait_s *= 2) > LONGEST_WAIT_S) {
            wait_s = LONGEST_WAIT_S;
        }
    }
}
