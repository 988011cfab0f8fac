/* A slow, lossy line between two network namespaces, over a TUN device in each.
 *
 *     line_emulator NAMESPACE_A NAMESPACE_B MBIT ONE_WAY_MS LOSS QUEUE_KB SEED [CAPTURE]
 *
 * The namespaces are files such as /proc/PID/ns/net. A has 10.99.0.1, B 10.99.0.2. LOSS is the share of packets
 * that are lost, each way; QUEUE_KB the buffer before the line, each way: packets that find it full are dropped.
 *
 * Commands, one a line on standard input: `cut`, `restore`, `counters`. Each is answered by one line; counters are
 * packets and bytes that came out, lost packets, and packets dropped at the full queue, A to B and then B to A.
 * All packets that come out are written to the file CAPTURE, each behind its length (16 bits).
 * The line ends with its standard input. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 1 << 14, MTU = 1500 };

struct packet {
    int64_t due_ns;
    size_t length;
    unsigned char bytes[MTU];
};

/* One direction: packets read from `from` go to `to`. */
struct direction {
    int from, to;
    int64_t busy_until_ns;
    uint32_t head, tail; /* of the ring */
    uint64_t packets, bytes, lost, dropped;
    struct packet *ring;
};

static double ns_per_byte, loss;
static int64_t delay_ns, queue_ns;
static uint64_t random_state;
static int is_cut;
static FILE *capture;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* From 0 to below 1 (xorshift64*). */
static double random_share(void) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (double)((random_state * 2685821657736338717ULL) >> 11) / 9007199254740992.0;
}

static int open_device(const char *namespace, const char *own, const char *peer) {
    struct ifreq request = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI};
    char command[256];
    int handle = open(namespace, O_RDONLY | O_CLOEXEC);
    if (handle < 0 || setns(handle, CLONE_NEWNET) != 0) fail(namespace);
    close(handle);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) != 0) fail("/dev/net/tun");
    snprintf(command, sizeof command,
             "ip address add %s peer %s dev wan0 && ip link set wan0 up mtu %d txqueuelen 4000", own, peer, MTU);
    if (system(command) != 0) fail("ip");
    return device;
}

/* Takes all that the kernel has for the line. */
static void take(struct direction *way) {
    for (;;) {
        struct packet *packet = &way->ring[way->tail % SLOTS];
        ssize_t count = read(way->from, packet->bytes, MTU);
        if (count <= 0) return;
        if (is_cut || random_share() < loss) {
            way->lost++;
            continue;
        }
        int64_t now = now_ns();
        int64_t start = way->busy_until_ns > now ? way->busy_until_ns : now;
        if (start - now > queue_ns || way->tail - way->head >= SLOTS - 1) {
            way->dropped++;
            continue;
        }
        way->busy_until_ns = start + (int64_t)((double)count * ns_per_byte);
        packet->length = (size_t)count;
        packet->due_ns = way->busy_until_ns + delay_ns;
        way->tail++;
    }
}

/* Delivers what is due. Returns when the next packet is. */
static int64_t deliver(struct direction *way) {
    while (way->head != way->tail) {
        struct packet *packet = &way->ring[way->head % SLOTS];
        if (packet->due_ns > now_ns()) return packet->due_ns;
        if (write(way->to, packet->bytes, packet->length) == (ssize_t)packet->length) {
            way->packets++;
            way->bytes += packet->length;
            uint16_t length = (uint16_t)packet->length;
            if (capture && (fwrite(&length, sizeof length, 1, capture) != 1 ||
                            fwrite(packet->bytes, packet->length, 1, capture) != 1))
                fail("capture");
        }
        way->head++;
    }
    return INT64_MAX;
}

/* Does one command. Returns 0 at the end of standard input. */
static int obey(const struct direction *ways) {
    char command[64] = {0};
    ssize_t count = read(0, command, sizeof command - 1);
    if (count <= 0) return 0;
    if (strcmp(command, "counters\n") == 0) {
        for (int i = 0; i < 2; i++)
            printf("%lu %lu %lu %lu%c", ways[i].packets, ways[i].bytes, ways[i].lost, ways[i].dropped, i ? '\n' : ' ');
    } else {
        is_cut = strcmp(command, "cut\n") == 0;
        printf("done\n");
    }
    fflush(stdout);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 8 || argc > 9) {
        fprintf(stderr, "usage: line_emulator NAMESPACE_A NAMESPACE_B MBIT ONE_WAY_MS LOSS QUEUE_KB SEED [CAPTURE]\n");
        return 2;
    }
    if (argc == 9 && !(capture = fopen(argv[8], "wb"))) fail(argv[8]);
    struct direction ways[2] = {0};
    ways[0].from = ways[1].to = open_device(argv[1], "10.99.0.1", "10.99.0.2");
    ways[1].from = ways[0].to = open_device(argv[2], "10.99.0.2", "10.99.0.1");
    ns_per_byte = 8e3 / atof(argv[3]);
    delay_ns = (int64_t)(atof(argv[4]) * 1e6);
    loss = atof(argv[5]);
    queue_ns = (int64_t)(atof(argv[6]) * 1e3 * ns_per_byte);
    random_state = strtoull(argv[7], NULL, 10) * 2654435761U + 88172645463325252ULL;
    for (int i = 0; i < 2; i++)
        if (!(ways[i].ring = malloc(sizeof(struct packet) * SLOTS))) fail("malloc");
    prctl(PR_SET_TIMERSLACK, 1000UL);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        int64_t first = deliver(&ways[0]), second = deliver(&ways[1]);
        int64_t next = first < second ? first : second;
        struct pollfd polls[3] = {{ways[0].from, POLLIN, 0}, {ways[1].from, POLLIN, 0}, {0, POLLIN, 0}};
        int64_t wait_ns = next == INT64_MAX ? 1000000000 : next - now_ns();
        /* Packets come up to 0.2 ms late: that halves the processor time. */
        if (wait_ns < 200000) wait_ns = 200000;
        struct timespec timeout = {wait_ns / 1000000000, wait_ns % 1000000000};
        if (ppoll(polls, 3, &timeout, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int i = 0; i < 2; i++)
            if (polls[i].revents & POLLIN) take(&ways[i]);
        if (polls[2].revents && !obey(ways)) return capture && fclose(capture) != 0;
    }
}
