/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of a token sequence, and reading through the socket. */
#include <errno.h>
#include <openssl/evp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include "chain.h"
#include "daemon.h"

/* ---- hashing */

#define BLOCK_TOKENS 16u

struct hashing {
    const char *scheme, *seed;
    uint32_t tokens[CHAIN * BLOCK_TOKENS];
    EVP_MD_CTX *context;
    EVP_MD *sha256;
};

/* Token ids of a vocabulary of 150,000. */
static void fill_tokens(struct hashing *h)
{
    uint64_t seed = 1;

    for (size_t i = 0; i < CHAIN * BLOCK_TOKENS; i++)
        h->tokens[i] = (uint32_t)(random_next(&seed) % 150000);
}

static int hash_ours(void *arg, double *ret)
{
    struct hashing *h = arg;
    struct kvd_hasher_options o;
    struct kvd_hasher *hasher;
    uint64_t start;
    ssize_t n;
    int r;

    kvd_hasher_options_init(&o, sizeof(o));
    o.scheme = h->scheme;
    o.seed = h->seed;
    r = kvd_hasher_new(&o, &hasher);
    if (r < 0)
        return r;
    start = now_ns();
    n = kvd_hasher_append(hasher, h->tokens, CHAIN * BLOCK_TOKENS);
    *ret = (double)(now_ns() - start) / CHAIN;
    kvd_hasher_free(hasher);
    return n == CHAIN ? 0 : -EIO;
}

/* The bare hash of the same tokens as 32-bit numbers behind their parent's hash. */
static int hash_sha256(void *arg, double *ret)
{
    struct hashing *h = arg;
    unsigned char block[32 + 4 * BLOCK_TOKENS] = {0};
    uint64_t start = now_ns();

    for (size_t i = 0; i < CHAIN; i++) {
        memcpy(block + 32, &h->tokens[i * BLOCK_TOKENS], 4 * BLOCK_TOKENS);
        if (!EVP_DigestInit_ex2(h->context, h->sha256, NULL) ||
            !EVP_DigestUpdate(h->context, block, sizeof(block)) ||
            !EVP_DigestFinal_ex(h->context, block, NULL))
            return -EIO;
    }
    *ret = (double)(now_ns() - start) / CHAIN;
    return 0;
}

static int hash_xxh3(void *arg, double *ret)
{
    struct hashing *h = arg;
    unsigned char block[16 + 4 * BLOCK_TOKENS] = {0};
    uint64_t start = now_ns();

    for (size_t i = 0; i < CHAIN; i++) {
        XXH128_hash_t x;

        memcpy(block + 16, &h->tokens[i * BLOCK_TOKENS], 4 * BLOCK_TOKENS);
        x = XXH3_128bits(block, sizeof(block));
        memcpy(block, &x, sizeof(x));
    }
    __asm__ volatile("" ::"r"(block) : "memory");
    *ret = (double)(now_ns() - start) / CHAIN;
    return 0;
}

int case_hash(struct bench *b)
{
    static const struct contender sha256 = {"SHA-256, reused context", hash_sha256};
    static const struct contender xxh3 = {"XXH3-128", hash_xxh3};
    static const struct {
        struct figure figure;
        const char *scheme, *seed;
        const struct contender *floor;
    } ways[] = {
        {{.name = "keys, vllm-sha256-cbor", .unit = "ns/block"},
         "vllm-sha256-cbor",
         "bench",
         &sha256},
        {{.name = "keys, vllm-xxhash-cbor", .unit = "ns/block"},
         "vllm-xxhash-cbor",
         "bench",
         &xxh3},
        {{.name = "keys, sglang", .unit = "ns/block"}, "sglang", NULL, &sha256},
    };
    struct hashing *h = calloc(1, sizeof(*h));
    int r = 0;

    if (!h)
        return -ENOMEM;
    fill_tokens(h);
    h->context = EVP_MD_CTX_new();
    h->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
    if (!h->context || !h->sha256)
        r = -ENOMEM;
    pin_cpu(0);
    for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]) && r == 0; i++) {
        h->scheme = ways[i].scheme;
        h->seed = ways[i].seed;
        r = bench_compare(b, &ways[i].figure, h, hash_ours, ways[i].floor, 1);
    }
    EVP_MD_free(h->sha256);
    EVP_MD_CTX_free(h->context);
    free(h);
    return r;
}

/* ---- reading through the socket */

#define GETS 32u

struct remote {
    struct session session;
    struct kvd_key key;
    char *buffer;
    unsigned gets;
    int fd;
    pid_t pid;
};

static int remote_get(void *arg, double *ret)
{
    struct remote *x = arg;
    uint64_t start = now_ns();

    for (unsigned i = 0; i < x->gets; i++) {
        ssize_t n = kvd_remote_get(x->session.pool, &x->key, 0, x->buffer, MIB, NULL);

        if (n != (ssize_t)MIB)
            return n < 0 ? (int)n : -EIO;
    }
    *ret = (double)(x->gets * MIB) * 1e3 / (double)(now_ns() - start);
    return 0;
}

/* A byte in, a MiB out. */
static int sender_start(struct remote *x)
{
    int fds[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return -errno;
    x->pid = fork();
    if (x->pid == 0) {
        char c;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        while (read(fds[1], &c, 1) == 1)
            for (size_t at = 0; at < MIB;) {
                ssize_t n = write(fds[1], x->buffer + at, MIB - at);

                if (n <= 0)
                    _exit(1);
                at += (size_t)n;
            }
        _exit(0);
    }
    close(fds[1]);
    x->fd = fds[0];
    return x->pid < 0 ? -errno : 0;
}

static int bare_socket(void *arg, double *ret)
{
    struct remote *x = arg;
    uint64_t start = now_ns();
    char c = 0;

    for (unsigned i = 0; i < x->gets; i++) {
        if (write(x->fd, &c, 1) != 1 || recv(x->fd, x->buffer, MIB, MSG_WAITALL) != (ssize_t)MIB)
            return -EPIPE;
    }
    *ret = (double)(x->gets * MIB) * 1e3 / (double)(now_ns() - start);
    return 0;
}

static int remote_open(const struct daemon *d, struct remote *x)
{
    struct shm_key k = chain_key(0);
    int r;

    memcpy(&x->key, &k, sizeof(k));
    x->buffer = malloc(MIB);
    if (!x->buffer)
        return -ENOMEM;
    memset(x->buffer, 0x5a, MIB);
    r = sender_start(x);
    if (r == 0)
        r = session_open(d, KVD_NO_SHM, &x->session);
    return r == 0 ? kvd_remote_put(x->session.pool, &x->key, NULL, x->buffer, MIB) : r;
}

int case_remote(struct bench *b)
{
    static const struct figure f = {
        .name = "kvd_remote_get, 1 MiB", .unit = "MB/s", .more_is_better = true};
    static const struct contender floor = {"a bare socket", bare_socket};
    struct remote x = {.gets = b->smoke ? 2 : GETS, .fd = -1};
    struct daemon d = {0};
    int r = daemon_start(b, DAEMON_SMALL_PAGES, "slot = 1M\nslots = 8", &d);

    if (r == 0)
        r = remote_open(&d, &x);
    if (r == 0)
        r = bench_compare(b, &f, &x, remote_get, &floor, 1);
    session_close(&x.session);
    daemon_stop(&d);
    if (x.pid > 0) {
        shutdown(x.fd, SHUT_RDWR);
        close(x.fd);
        waitpid(x.pid, NULL, 0);
    }
    free(x.buffer);
    return r;
}
