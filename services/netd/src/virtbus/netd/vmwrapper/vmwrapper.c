/* vmwrapper: fetches a VM's tap descriptors from netd, then becomes QEMU.
 *
 * The same program as vmwrapper.py beside it, which says why things are so. Built at install with
 * -DWRAPPER_SOCKET="..." -DEMULATOR="...". What is written to stderr is what libvirt shows.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FRAME = 64 * 1024, MAX_DESCRIPTORS = 128, TIMEOUT_S = 8 };

static char answer[4 + MAX_FRAME + 1];
static int descriptors[MAX_DESCRIPTORS], descriptor_count;

static void fail(const char *format, ...) {
  char line[2048];
  va_list values;
  va_start(values, format);
  int length = vsnprintf(line, sizeof line - 1, format, values);
  va_end(values);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length] = '\n';
  if (write(2, "virtbus: ", 9) < 0 || write(2, line, length + 1) < 0) _exit(1);
  _exit(1);
}

static void unreachable(void) {
  fail("netd_unreachable: %s; is virtbus-netd running?", strerror(errno));
}

static long long now_ns(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000000LL + at.tv_nsec;
}

static const char *option(int argc, char **argv, const char *name) {
  const char *value = "";
  for (int at = 1; at + 1 < argc; at++)
    if (strcmp(argv[at], name) == 0) value = argv[at + 1];
  return value;
}

static int connected(void) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  struct timeval patience = {.tv_sec = TIMEOUT_S};
  struct ucred owner;
  socklen_t length = sizeof owner;
  if (sizeof WRAPPER_SOCKET > sizeof address.sun_path) fail("netd_path: the socket's path is too long");
  strcpy(address.sun_path, WRAPPER_SOCKET);
  int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (peer < 0 || setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) ||
      setsockopt(peer, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) ||
      connect(peer, (struct sockaddr *)&address, sizeof address) ||
      getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &owner, &length))
    unreachable();
  if (owner.uid)
    fail("netd_foreign: the process behind netd's socket is not root's; restart virtbus-netd");
  return peer;
}

static void receive(int peer) {
  size_t have = 0, whole = 4;
  while (have < whole) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof descriptors)];
    struct iovec data = {answer + have, 4 + MAX_FRAME - have};
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t count = recvmsg(peer, &message, 0);
    if (count < 0) unreachable();
    if (count == 0) fail("netd_gone: netd closed the connection; see its log, start the VM again");
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    if (part && part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      descriptor_count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      memcpy(descriptors, CMSG_DATA(part), descriptor_count * sizeof(int));
    }
    have += count;
    if (have >= 4) {
      uint32_t length;
      memcpy(&length, answer, 4);
      whole = 4 + (size_t)ntohl(length);
      if (whole > 4 + MAX_FRAME) fail("netd_answer: the frame is too long");
    }
  }
  answer[have] = 0;
}

/* The word with the number of descriptor k in place of @fd<k>@. */
static char *numbered(char *word) {
  for (int place = 0; place < descriptor_count; place++) {
    char mark[16], *at, *result;
    snprintf(mark, sizeof mark, "@fd%d@", place);
    if (!(at = strstr(word, mark))) continue;
    if (asprintf(&result, "%.*s%d%s", (int)(at - word), word, descriptors[place],
                 at + strlen(mark)) < 0)
      fail("wrapper_memory: no memory");
    word = result;
  }
  return word;
}

int main(int argc, char **argv) {
  long long entered_ns = now_ns();
  const char *uid = option(argc, argv, "-uuid");
  if (strncmp(option(argc, argv, "-name"), "guest=", 6) != 0 || !*uid || strlen(uid) > 64) {
    argv[0] = EMULATOR;
    execv(EMULATOR, argv);
    fail("emulator: %s: %s", EMULATOR, strerror(errno));
  }
  int peer = connected();
  char request[256];
  int length = snprintf(request + 4, sizeof request - 4, "virtbus-wrapper/1%c%s%c%lld%c%lld%c", 0,
                        uid, 0, entered_ns, 0, now_ns(), 0);
  uint32_t size = htonl(length);
  memcpy(request, &size, 4);
  if (send(peer, request, 4 + length, MSG_NOSIGNAL) != 4 + length) unreachable();
  receive(peer);
  close(peer);

  uint32_t body;
  memcpy(&body, answer, 4);
  char *end = answer + 4 + ntohl(body), *word = answer + 4;
  char **command = calloc(argc + MAX_FRAME / 2, sizeof *command);
  if (!command) fail("wrapper_memory: no memory");
  int count = 0, words = 0;
  for (; word < end; word += strlen(word) + 1, words++) {
    if (words == 0 && strcmp(word, "A") != 0) fail("%s", word + 2 < end ? word + 2 : "netd_answer: no answer");
    if (words == 1) {
      command[count++] = word;
      for (int at = 1; at < argc; at++) command[count++] = argv[at];
    }
    if (words == 2 && atoi(word) != descriptor_count)
      fail("netd_answer: %d descriptors came, %s were named", descriptor_count, word);
    if (words > 2) command[count++] = numbered(word);
  }
  if (words < 3) fail("netd_answer: no answer");
  execv(command[0], command);
  fail("emulator: %s: %s", command[0], strerror(errno));
}
