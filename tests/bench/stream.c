/* stream listen PORT send|receive SECONDS, or stream connect ADDRESS PORT send|receive SECONDS: one TCP stream.
 * The receiver prints `begin`, and at the end `end BYTES NANOSECONDS`. It discards what it receives, as the sender
 * sends the same pages again and again: so little of a guest's time as possible is its program's own. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define CHUNK (256 * 1024)

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int fail(const char *what) {
    perror(what);
    return 1;
}

static int peer_of(char **word, int listens) {
    struct sockaddr_in at = {.sin_family = AF_INET};
    int on = 1, ends = socket(AF_INET, SOCK_STREAM, 0);
    if (!listens && inet_pton(AF_INET, *word++, &at.sin_addr) != 1)
        return -1;
    at.sin_port = htons(atoi(*word));
    if (listens) {
        setsockopt(ends, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(ends, (void *)&at, sizeof at) || listen(ends, 1))
            return -1;
        return accept(ends, NULL, NULL);
    }
    for (int tries = 0; tries < 300; tries++) { /* the listener may not listen yet */
        if (!connect(ends, (void *)&at, sizeof at))
            return ends;
        close(ends);
        usleep(100000);
        ends = socket(AF_INET, SOCK_STREAM, 0);
    }
    return -1;
}

int main(int argc, char **argv) {
    static char chunk[CHUNK];
    int listens = argc > 1 && !strcmp(argv[1], "listen");
    if (argc != (listens ? 5 : 6))
        return 2;
    int peer = peer_of(argv + 2, listens);
    if (peer < 0)
        return fail("no peer");
    struct timeval limit = {.tv_sec = 30}; /* of a stalled stream */
    setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    long long begun = now_ns(), bytes = 0;
    ssize_t done;
    if (!strcmp(argv[argc - 2], "send")) {
        long long end = begun + atoi(argv[argc - 1]) * 1000000000LL;
        while (now_ns() < end)
            if (send(peer, chunk, CHUNK, 0) < 0)
                return fail("send");
        shutdown(peer, SHUT_WR);
        while (recv(peer, chunk, CHUNK, 0) > 0)
            ;
        return 0;
    }
    puts("begin");
    fflush(stdout);
    while ((done = recv(peer, chunk, CHUNK, MSG_TRUNC)) > 0)
        bytes += done;
    printf("end %lld %lld\n", bytes, now_ns() - begun);
    return done < 0 ? fail("receive") : 0;
}
