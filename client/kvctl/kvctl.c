/* SPDX-License-Identifier: Apache-2.0 */
/* kvctl: the table of commands; usage, help and dispatch are made from it. */
#include "kvctl.h"

#include <ctype.h>
#include <getopt.h>
#include <locale.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/config.h"
#include "version.h"

#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

/* ---- options */

enum {
    GLOBAL = 1000, /* getopt values: this + index of a global option, else index of the command's */
};

static const struct option_spec global_options[] = {
    {"socket", 's', "PATH",
     "the daemon's socket (default: $KVD_SOCKET, else the first that works of "
     "/run/kvd/kvd-admin.sock and /run/kvd/kvd.sock)"},
    {"output", 'o', "FORMAT", "table or json (default table)"},
    {"no-headers", 0, NULL, "tables without the line of titles"},
    {"no-color", 0, NULL, "no colours; also with $NO_COLOR, and when the output is no terminal"},
    {"timeout", 0, "SECONDS", "how long one answer may take (default 10)"},
    {"help", 'h', NULL, "help; after a command: help for it"},
    {"version", 'V', NULL, "the version"},
    {NULL, 0, NULL, NULL},
};

static const struct option_spec wait_options[] = {
    {"ready", 0, NULL, "wait until the daemon serves, not only until it answers"},
    {NULL, 0, NULL, NULL},
};

static const struct option_spec check_options[] = {
    {"config", 'c', "FILE", "also check what this configuration needs"},
    {"root", 0, "DIR", "take /proc, /sys, /dev and /run from below DIR: a copy of a machine's"},
    {NULL, 0, NULL, NULL},
};

static const struct option_spec blocks_options[] = {
    {"limit", 'n', "N", "show at most N objects (default 100)"},
    {"all", 'a', NULL, "show all objects"},
    {"tier", 0, "TIER", "ram (the pool itself, the default) or nvme (its spill stores)"},
    {NULL, 0, NULL, NULL},
};

static const struct option_spec stats_options[] = {
    {"interval", 'i', "SECONDS", "again and again, with rates"},
    {"count", 'n', "N", "with -i: end after N times"},
    {"openmetrics", 0, NULL, "as text in the OpenMetrics format"},
    {NULL, 0, NULL, NULL},
};

static const struct option_spec keys_options[] = {
    {"scheme", 0, "NAME", "vllm-sha256-cbor, vllm-xxhash-cbor or sglang; must be given"},
    {"format", 'f', "FORMAT",
     "of the tokens: bytes (each byte is one), json (an array of numbers) or "
     "u32 (little-endian); default: by the end of the name, .json and .u32, "
     "else bytes"},
    {"block-tokens", 'b', "N", "tokens of a block (default 16)"},
    {"seed", 0, "TEXT", "vllm: the text whose hash is the first parent (vLLM: PYTHONHASHSEED)"},
    {"first-parent", 0, "HEX", "vllm: the first parent itself, 16 or 32 bytes"},
    {"salt", 0, "TEXT", "the request's cache salt"},
    {"lora", 0, "NAME", "vllm: the request's LoRA adapter"},
    {"extra-key", 0, "TEXT", "sglang: the request's extra key"},
    {"group", 'g', "N", "the engine's layer group (default 0)"},
    {NULL, 0, NULL, NULL},
};

static const struct option_spec evict_options[] = {
    {"count", 'n', "N", "the N coldest objects; from memory only, copies in stores stay"},
    {"tenant", 't', "T", "all objects of tenant T"},
    {NULL, 0, NULL, NULL},
};

#define NO_WAIT                                                                                    \
    {                                                                                              \
        "no-wait", 0, NULL, "do not wait for the end; `kvctl spill` tells how far it is"           \
    }

static const struct option_spec spill_wait_options[] = {
    NO_WAIT,
    {NULL, 0, NULL, NULL},
};

static const struct option_spec spill_format_options[] = {
    {"force", 0, NULL, "although something else is on it, or objects are lost"},
    {"yes", 'y', NULL, "do not ask"},
    NO_WAIT,
    {NULL, 0, NULL, NULL},
};

static const struct option_spec spill_scrub_options[] = {
    {"rate", 0, "SIZE",
     "read at most so much per second; 0: no limit (default: as fast as possible without "
     "slowing others)"},
    NO_WAIT,
    {NULL, 0, NULL, NULL},
};

/* ---- commands */

static int run_help(struct ctl *c, char **args, int n);

static const struct command commands[] = {
    {
        .heading = "Looking",
        .name = "status",
        .summary = "state of the daemon, its spaces, pools, stores and sockets",
        .help = "Exit status 4 when the daemon is not ready: degraded, starting or stopping.",
        .example = "kvctl status",
        .run = run_status,
    },
    {
        .name = "ping",
        .summary = "one round trip to the daemon",
        .example = "kvctl ping",
        .run = run_ping,
    },
    {
        .name = "wait",
        .summary = "wait for the daemon to answer",
        .help = "Waits as long as --timeout says, or 30 seconds. A degraded daemon serves, so it "
                "counts as ready.",
        .example = "kvctl wait --ready --timeout 120 && start-workers",
        .options = wait_options,
        .run = run_wait,
    },
    {
        .name = "check",
        .summary = "find what is wrong, with the command that mends it",
        .help =
            "Looks at the daemon, its pools and sessions, and at this machine: kernel, hugepages, "
            "memory, limits. Works without a daemon too. Each line says ok, warn, FAIL, or skip "
            "for what could not be looked at. Exit status 4 when there is a FAIL.",
        .example = "sudo kvctl check -c /etc/kvd/kvd.conf",
        .options = check_options,
        .run = run_check,
    },
    {
        .name = "spaces",
        .summary = "spaces: one model on one trust domain each",
        .example = "kvctl spaces -o json",
        .run = run_spaces,
    },
    {
        .name = "pools",
        .summary = "pools: memory, slots and what is in them",
        .help = "PINNED counts slots that some process holds. RESERVED ones are being written, "
                "QUARANTINED ones are kept unused because a dead process may still write to them.",
        .example = "kvctl pools",
        .run = run_pools,
    },
    {
        .name = "sessions",
        .summary = "attached processes and what they hold",
        .help = "PINNED is what a process holds now: such objects cannot be evicted. OLDEST PIN is "
                "how long the one held longest has not been pinned or released. Needs an "
                "administrator's socket.",
        .example = "kvctl sessions",
        .run = run_sessions,
    },
    {
        .name = "blocks",
        .args = "POOL",
        .min_args = 1,
        .max_args = 1,
        .summary = "objects in a pool, in the order of their slots",
        .help =
            "With --tier nvme: what the pool's spill stores hold; SLOT is then the record in the "
            "store. An object of the pool that has a copy in a store names that store. Needs an "
            "administrator's socket.",
        .example = "kvctl blocks demo/kv --tier nvme --limit 20",
        .options = blocks_options,
        .run = run_blocks,
    },
    {
        .name = "why",
        .args = "POOL KEY",
        .min_args = 2,
        .max_args = 2,
        .summary = "what became of a key",
        .help = "Says whether the object is present, pending (being written), evicted, refused, "
                "... or never stored, since when, and why. Exit status 5 when it is not in the "
                "pool. Needs an administrator's socket.",
        .example = "kvctl why demo/kv cd7c51bc5a8fc8643f383a2b9e01522f",
        .run = run_why,
    },
    {
        .name = "stats",
        .args = "[POOL]",
        .max_args = 1,
        .summary = "counters and gauges",
        .help = "Names and units are those of OpenMetrics: counters end in _total. With -i, RATE "
                "is per second, and -o json prints one document per line.",
        .example = "kvctl stats demo/kv -i 5",
        .options = stats_options,
        .run = run_stats,
    },
    {
        .heading = "Keys and configuration",
        .name = "keys",
        .args = "FILE",
        .min_args = 1,
        .max_args = 1,
        .summary = "the keys of a token sequence",
        .help = "Computes the chain of keys that an engine would compute: one key for each whole "
                "block, each naming all tokens up to its end. FILE - is standard input. Does not "
                "ask the daemon. Multimodal items are not supported.",
        .example = "kvctl keys --scheme vllm-sha256-cbor --seed 0 prompt.json",
        .options = keys_options,
        .run = run_keys,
    },
    {
        .name = "config check",
        .args = "[FILE]",
        .max_args = 1,
        .summary = "check a configuration file",
        .help = "Reads it as the daemon would, with conf.d/*.conf beside it, and prints every "
                "problem with its line. Changes nothing. The default is " CONFIG_FILE ".",
        .example = "kvctl config check ./kvd.conf",
        .run = run_config_check,
    },
    {
        .heading = "Acting (on an administrator's socket)",
        .name = "evict",
        .args = "POOL [KEY...]",
        .min_args = 1,
        .max_args = ANY_NUMBER,
        .summary = "remove objects: these keys, the coldest, or a tenant's",
        .help = "Give keys, or --count, or --tenant. Keys and a tenant's objects are removed from "
                "spill stores, too; --count makes room in memory only, and what has a copy in a "
                "store can still be fetched. Pinned objects stay. Exit status 5 when a key was not "
                "there, 1 when it was pinned.",
        .example = "kvctl evict demo/kv --count 1000",
        .options = evict_options,
        .run = run_evict,
    },
    {
        .name = "flush",
        .args = "SPACE",
        .min_args = 1,
        .max_args = 1,
        .summary = "remove all objects of a space that are not pinned",
        .help = "From memory and from spill stores. Objects that are pinned or being written stay.",
        .example = "kvctl flush demo",
        .run = run_flush,
    },
    {
        .name = "kill",
        .args = "SESSION",
        .min_args = 1,
        .max_args = 1,
        .summary = "end the process of a session (SIGKILL)",
        .help = "Its pins and reservations are taken back. The signal goes through a pidfd: it "
                "cannot hit another process.",
        .example = "kvctl kill 7",
        .run = run_kill,
    },
    {
        .heading = "NVMe: spill stores (acting needs an administrator's socket)",
        .name = "spill status",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "stores, what they hold, what goes on; also: `kvctl spill`",
        .help =
            "RECORDS is how many objects fit, USED how many are there, QUEUED how many wait to be "
            "written to the pool's stores. WRITTEN counts what the device was given since the "
            "daemon began: watch it for wear. Below the table: what is wrong, and its fix. Exit "
            "status 4 when a store is offline, read-only or waiting, or has a problem.",
        .example = "kvctl spill status demo/kv/nvme0",
        .run = run_spill_status,
    },
    {
        .name = "spill format",
        .args = "STORE",
        .min_args = 1,
        .max_args = 1,
        .summary = "make a store anew; its objects are lost",
        .help =
            "Needed when the file or device holds something else, or a store of another model or "
            "geometry: kvd does not touch those by itself. On a terminal it asks first. The "
            "store is taken up afterwards.",
        .example = "kvctl spill format demo/kv/nvme0 --force",
        .options = spill_format_options,
        .run = run_spill_format,
    },
    {
        .name = "spill scrub",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "read all objects, drop those that are damaged",
        .help =
            "A damaged object is never served, scrubbed or not: each is checked when it is "
            "fetched. Scrubbing finds out beforehand how well a device keeps its bytes. It goes "
            "on when kvctl is interrupted; `kvctl spill stop` ends it.",
        .example = "kvctl spill scrub --rate 200M",
        .options = spill_scrub_options,
        .run = run_spill_scrub,
    },
    {
        .name = "spill trim",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "tell the device which parts are free",
        .help = "Discards what holds no object (as fstrim does; in a file: punches holes). Helps a "
                "drive after many objects have been removed; a store in normal use is full.",
        .example = "kvctl spill trim demo/kv/nvme0",
        .options = spill_wait_options,
        .run = run_spill_trim,
    },
    {
        .name = "spill online",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "use a store again that is offline or read-only",
        .help =
            "After its cause has been mended: a drive replaced, space made. The store is opened "
            "and its table read as at start. Exit status 1 when that fails.",
        .example = "kvctl spill online demo/kv/nvme0",
        .options = spill_wait_options,
        .run = run_spill_online,
    },
    {
        .name = "spill offline",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "stop using a store, e.g. to take the drive out",
        .help = "What is only there becomes a miss. What is on it stays, for `kvctl spill online`; "
                "the next start of the daemon takes it up as well.",
        .example = "kvctl spill offline demo/kv/nvme0",
        .run = run_spill_offline,
    },
    {
        .name = "spill sync",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "wait until all that is queued has been written",
        .help =
            "Before a restart, so that it loses nothing. Objects that are stored meanwhile count, "
            "too: with workers at work it may take long.",
        .example = "kvctl spill sync && systemctl restart kvd",
        .options = spill_wait_options,
        .run = run_spill_sync,
    },
    {
        .name = "spill stop",
        .args = "[STORE]",
        .max_args = 1,
        .summary = "end a scrub",
        .example = "kvctl spill stop",
        .run = run_spill_stop,
    },
    {
        .name = "spill",
        .args = "[SUBCOMMAND]",
        .max_args = ANY_NUMBER,
        .summary = "the same as spill status",
        .help = "A spill store is a file or a block device in which objects of a pool go on living "
                "when memory is needed for others, and after a restart; [spill SPACE/POOL/NAME] in "
                "kvd.conf(5) makes one. STORE is that name. Objects are written in the background, "
                "parents first, and come back when a worker fetches them. A store that fails goes "
                "offline, and all goes on in memory. There are: spill status, format, scrub, trim, "
                "online, offline, sync, stop; each has its own --help.",
        .example = "kvctl spill",
        .run = run_spill,
    },
    {
        .heading = "Other",
        .name = "completion",
        .args = "SHELL",
        .min_args = 1,
        .max_args = 1,
        .summary = "completion of commands, options and names: bash or zsh",
        .help = "Prints a script. Names of pools, spaces and stores are asked of the daemon.",
        .example = "source <(kvctl completion bash)",
        .run = run_completion,
    },
    {
        .name = "version",
        .summary = "versions of kvctl and of the daemon",
        .example = "kvctl version",
        .run = run_version,
    },
    {
        .name = "help",
        .args = "[COMMAND]",
        .max_args = 2,
        .summary = "this text, or help for a command",
        .example = "kvctl help check",
        .run = run_help,
    },
};

/* ---- messages */

/* C1 controls are two bytes in UTF-8. */
void ctl_make_printable(char *text)
{
    for (unsigned char *p = (unsigned char *)text; *p; p++) {
        if (p[0] == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0)
            p[0] = p[1] = '?';
        if (iscntrl(*p) && *p != '\n')
            *p = '?';
    }
}

static void say(const char *fmt, va_list args)
{
    char text[2048];

    vsnprintf(text, sizeof(text), fmt, args);
    ctl_make_printable(text);
    fflush(stdout);
    fprintf(stderr, "kvctl: %s\n", text);
}

int ctl_fail(int status, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    say(fmt, args);
    va_end(args);
    return status;
}

void ctl_note(const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    say(fmt, args);
    va_end(args);
}

_Noreturn void ctl_out_of_memory(void)
{
    ctl_fail(EXIT_FAILED, "out of memory");
    exit(EXIT_FAILED);
}

/* ---- suggestions */

enum { WORD_MAX = 64 };

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Insertions, deletions, replacements, and swaps of neighbours. */
static size_t distance(const char *a, const char *b)
{
    size_t n = strlen(b), rows[3][WORD_MAX + 1], *before = rows[0], *last = rows[1], *row = rows[2];

    for (size_t j = 0; j <= n; j++)
        last[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t *spare = before;

        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            row[j] = least(least(last[j], row[j - 1]) + 1, last[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = least(row[j], before[j - 2] + 1);
        }
        before = last;
        last = row;
        row = spare;
    }
    return last[n];
}

const char *ctl_suggest(const char *word, const char *(*at)(const void *arg, size_t i),
                        const void *arg)
{
    size_t len = strlen(word), best = len / 3 + 2; /* farther away is another word */
    const char *found = NULL, *name;

    if (len > WORD_MAX)
        return NULL;
    for (size_t i = 0; (name = at(arg, i)); i++) {
        size_t d = strlen(name) <= WORD_MAX ? distance(word, name) : best;

        if (len >= 3 && strncmp(name, word, len) == 0) /* an abbreviation */
            d = least(d, 1);
        if (d < best) {
            best = d;
            found = name;
        }
    }
    return found;
}

static const char *command_at(const void *arg, size_t i)
{
    (void)arg;
    return i < LENGTH(commands) ? commands[i].name : NULL;
}

static int unknown_command(const char *word)
{
    const char *name = ctl_suggest(word, command_at, NULL);

    if (name)
        return ctl_fail(EXIT_USAGE, "there is no command \"%.64s\"; did you mean \"%s\"?", word,
                        name);
    return ctl_fail(EXIT_USAGE, "there is no command \"%.64s\"; `kvctl --help` lists them", word);
}

/* ---- finding */

/* The command that begins at words[0]; *ret_words: how many words its name has. */
static const struct command *find_command(char **words, int n, int *ret_words)
{
    for (size_t i = 0; i < LENGTH(commands); i++) {
        const char *name = commands[i].name, *space = strchr(name, ' ');
        size_t head = space ? (size_t)(space - name) : strlen(name);

        if (strlen(words[0]) != head || strncmp(words[0], name, head) != 0)
            continue;
        if (space && (n < 2 || strcmp(words[1], space + 1) != 0))
            continue;
        *ret_words = space ? 2 : 1;
        return &commands[i];
    }
    return NULL;
}

/* Of "config check" when only "config" was given. */
static const struct command *find_beginning(const char *word)
{
    size_t len = strlen(word);

    for (size_t i = 0; i < LENGTH(commands); i++)
        if (strncmp(commands[i].name, word, len) == 0 && commands[i].name[len] == ' ')
            return &commands[i];
    return NULL;
}

/* ---- help */

enum { TERMINAL_WIDTH = 80, SYNOPSIS_SIZE = 40 };

/* Wrapped; the first line goes on where something has been printed, `column` wide. */
static void print_text(const char *text, int column)
{
    int at = column;

    while (*text) {
        int n = (int)strcspn(text, " ");

        if (at > column && at + 1 + n > TERMINAL_WIDTH) {
            printf("\n%*s", column, "");
            at = column;
        }
        at += printf("%s%.*s", at > column ? " " : "", n, text);
        text += n;
        text += strspn(text, " ");
    }
    putchar('\n');
}

static void print_options(const struct option_spec *o)
{
    for (; o->name; o++) {
        char left[40], letter[8] = "    ";

        if (o->letter)
            snprintf(letter, sizeof(letter), "-%c, ", o->letter);
        snprintf(left, sizeof(left), "%s--%s%s%s", letter, o->name, o->arg ? " " : "",
                 o->arg ? o->arg : "");
        print_text(o->help, printf("  %-22s  ", left));
    }
}

/* "evict POOL [KEY...]" */
static const char *synopsis(const struct command *command, char buf[static SYNOPSIS_SIZE])
{
    snprintf(buf, SYNOPSIS_SIZE, "%s%s%s", command->name, command->args ? " " : "",
             command->args ? command->args : "");
    return buf;
}

static void print_command_help(const struct command *command)
{
    char buf[SYNOPSIS_SIZE];

    printf("Usage: kvctl [OPTIONS] %s\n\n", synopsis(command, buf));
    printf("%c%s.\n", toupper((unsigned char)command->summary[0]), command->summary + 1);
    if (command->help)
        print_text(command->help, 0);
    if (command->options) {
        puts("\nOptions:");
        print_options(command->options);
    }
    printf("\nExample:\n  %s\n\n`kvctl --help` has the options for all commands.\n",
           command->example);
}

static void print_help(void)
{
    puts("Usage: kvctl [OPTIONS] COMMAND [ARGUMENTS]\n"
         "Looks at kvd, the cache of KV blocks of this host, and administers it.");
    for (size_t i = 0; i < LENGTH(commands); i++) {
        char buf[SYNOPSIS_SIZE];

        if (commands[i].heading)
            printf("\n%s:\n", commands[i].heading);
        printf("  %-21s  %s\n", synopsis(&commands[i], buf), commands[i].summary);
    }
    puts("\nOptions:");
    print_options(global_options);
    puts(
        "\nA POOL is SPACE/NAME or a number; a KEY is 2 to 64 hexadecimal digits, and then\n"
        "possibly :GROUP; a STORE is SPACE/POOL/NAME.\n\n"
        "Exit status:\n"
        "  0  done, or healthy\n"
        "  1  failed\n"
        "  2  wrong usage\n"
        "  3  the daemon cannot be reached, or does not answer\n"
        "  4  unhealthy: the daemon is not ready, a store is not well, or `check` found a failure\n"
        "  5  there is no such pool, space, store, session, key or file\n"
        "  6  refused: no permission\n\n"
        "`kvctl COMMAND --help` has an example for each. Manual: kvctl(1).");
}

static int run_help(struct ctl *c, char **args, int n)
{
    const struct command *command;
    int words;

    (void)c;
    if (n == 0) {
        print_help();
        return 0;
    }
    command = find_command(args, n, &words);
    if (!command)
        command = find_beginning(args[0]);
    if (!command)
        return unknown_command(args[0]);
    print_command_help(command);
    return 0;
}

/* ---- completion */

static void print_names(const struct option_spec *o)
{
    for (; o && o->name; o++) {
        printf(" --%s", o->name);
        if (o->letter)
            printf(" -%c", o->letter);
    }
}

/* Options of the whole program whose value is the next word. */
static void print_valued(void)
{
    for (const struct option_spec *o = global_options; o->name; o++) {
        if (!o->arg)
            continue;
        printf("%s--%s", o == global_options ? "" : "|", o->name);
        if (o->letter)
            printf("|-%c", o->letter);
    }
}

/* What the first argument is: a command that lists such, or NULL. */
static const char *lister(const struct command *command)
{
    const char *args = command->args ? command->args : "";

    if (strstr(args, "POOL"))
        return "pools";
    if (strstr(args, "SPACE"))
        return "spaces";
    return strstr(args, "STORE") ? "spill" : NULL;
}

static void print_case(const struct command *command)
{
    const char *list = lister(command), *words = NULL;

    if (strcmp(command->name, "help") == 0)
        words = "$commands";
    else if (strcmp(command->name, "completion") == 0)
        words = "bash zsh";
    printf("    \"%s\") options=\"", command->name);
    print_names(command->options);
    putchar('"');
    if (words)
        printf(" words=\"%s\"", words);
    if (list)
        printf(" names=%s", list);
    puts(" ;;");
}

/* The first words; of two-word commands the second ones follow, as a case of their own. */
static void print_heads(void)
{
    for (size_t i = 0; i < LENGTH(commands); i++) {
        int n = (int)strcspn(commands[i].name, " ");

        if (i == 0 || strcspn(commands[i - 1].name, " ") != (size_t)n ||
            strncmp(commands[i].name, commands[i - 1].name, (size_t)n) != 0)
            printf("%s%.*s", i ? " " : "", n, commands[i].name);
    }
}

static void print_tails(void)
{
    for (size_t i = 0; i < LENGTH(commands); i++) {
        const char *name = commands[i].name, *space = strchr(name, ' ');

        if (space)
            printf("    %.*s) seconds+=\" %s\" ;;&\n", (int)(space - name), name, space + 1);
    }
}

int run_completion(struct ctl *c, char **args, int n)
{
    (void)c;
    (void)n;
    if (strcmp(args[0], "zsh") == 0)
        puts("autoload -U +X bashcompinit && bashcompinit");
    else if (strcmp(args[0], "bash") != 0)
        return ctl_fail(EXIT_USAGE, "there is completion for bash and zsh, not for \"%.64s\"",
                        args[0]);
    printf("_kvctl() {\n    local commands=\"");
    print_heads();
    printf("\"\n    local cur=${COMP_WORDS[COMP_CWORD]} i first= second= seconds= options= words= "
           "names=\n"
           "    local -a socket=()\n"
           "    for ((i = 1; i < COMP_CWORD; i++)); do\n"
           "        case ${COMP_WORDS[i]} in\n"
           "        -s|--socket) socket=(-s \"${COMP_WORDS[++i]}\") ;;\n"
           "        ");
    print_valued();
    printf(") ((++i)) ;;\n"
           "        -*) ;;\n"
           "        *) if [[ -z $first ]]; then first=${COMP_WORDS[i]}; else "
           "second=${second:-${COMP_WORDS[i]}}; fi ;;\n"
           "        esac\n"
           "    done\n"
           "    case $first in\n");
    print_tails();
    printf("    '') words=$commands ;;\n"
           "    esac\n"
           "    if [[ -n $second && \" $seconds \" == *\" $second \"* ]]; then\n"
           "        first+=\" $second\"\n"
           "    else\n"
           "        words+=$seconds\n"
           "    fi\n"
           "    case $first in\n");
    for (size_t i = 0; i < LENGTH(commands); i++)
        print_case(&commands[i]);
    printf("    esac\n"
           "    if [[ $cur == -* ]]; then\n"
           "        words=\"$options");
    print_names(global_options);
    puts("\"\n"
         "    elif [[ ${COMP_WORDS[COMP_CWORD - 1]} == --tier ]]; then\n"
         "        words='ram nvme'\n"
         "    elif [[ -n $names ]]; then\n"
         "        words+=\" $(kvctl \"${socket[@]}\" \"$names\" --no-headers 2>/dev/null |\n"
         "            awk '$1 !~ /:$/ { print $1 }')\"\n"
         "    fi\n"
         "    mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n"
         "}\n"
         "complete -o default -F _kvctl kvctl");
    return 0;
}

/* ---- parsing */

const char *ctl_option(const struct ctl *c, const char *name)
{
    for (size_t i = 0; c->command->options[i].name; i++)
        if (strcmp(c->command->options[i].name, name) == 0)
            return c->values[i];
    abort(); /* the table and the command disagree */
}

static int set_global(struct ctl *c, const struct option_spec *o, const char *value)
{
    if (strcmp(o->name, "socket") == 0)
        c->socket = value;
    else if (strcmp(o->name, "no-headers") == 0)
        c->headers = false;
    else if (strcmp(o->name, "no-color") == 0)
        c->color = false;
    else if (strcmp(o->name, "help") == 0)
        c->help = true;
    else if (strcmp(o->name, "version") == 0)
        c->version = true;
    else if (strcmp(o->name, "timeout") == 0) {
        c->timeout_given = true;
        return parse_seconds("--timeout", value, &c->timeout_ms);
    } else if (strcmp(value, "json") == 0 || strcmp(value, "table") == 0)
        c->json = value[0] == 'j';
    else
        return ctl_fail(EXIT_USAGE, "--output is table or json, not \"%.64s\"", value);
    return 0;
}

struct getopt_tables {
    struct option longs[LENGTH(global_options) + OPTIONS_MAX];
    char shorts[3 * (LENGTH(global_options) + OPTIONS_MAX)];
    size_t n, n_shorts;
};

static void add_options(struct getopt_tables *t, const struct option_spec *o, int first)
{
    for (int i = 0; o && o[i].name; i++) {
        t->longs[t->n++] = (struct option){.name = o[i].name,
                                           .has_arg = o[i].arg ? required_argument : no_argument,
                                           .val = first + i};
        if (!o[i].letter)
            continue;
        t->shorts[t->n_shorts++] = o[i].letter;
        if (o[i].arg)
            t->shorts[t->n_shorts++] = ':';
    }
}

/* The getopt value of a letter, as add_options() gives it to the name. */
static int index_of_letter(const struct command *command, int letter)
{
    for (int i = 0; command && command->options && command->options[i].name; i++)
        if (command->options[i].letter == letter)
            return i;
    for (int i = 0; global_options[i].name; i++)
        if (global_options[i].letter == letter)
            return GLOBAL + i;
    return letter;
}

static bool is_letter(int value)
{
    return value > OPTIONS_MAX && value < GLOBAL;
}

static int bad_option(const struct ctl *c, int kind, char **argv)
{
    const char *word = argv[optind - 1];
    char letter[3] = {'-', (char)optopt, '\0'};

    if (strncmp(word, "--", 2) != 0 && is_letter(optopt))
        word = letter;
    return ctl_fail(EXIT_USAGE, "%s \"%.64s\"; see `kvctl %s%s--help`",
                    kind == ':' ? "a value is missing after the option"
                                : "there is no option (or it takes no value)",
                    word, c->command ? c->command->name : "", c->command ? " " : "");
}

/* Options of argv[1..]; afterwards the arguments begin at *ret_first. Without a command it stops at
 * the first word that is no option. */
static int parse_options(struct ctl *c, int argc, char **argv, int *ret_first)
{
    struct getopt_tables t = {.n = 0};
    int value, r = 0;

    if (!c->command)
        t.shorts[t.n_shorts++] = '+';
    t.shorts[t.n_shorts++] = ':';
    add_options(&t, c->command ? c->command->options : NULL, 0);
    add_options(&t, global_options, GLOBAL);
    optind = 0; /* glibc: begin anew */
    opterr = 0;
    while (r == 0 && (value = getopt_long(argc, argv, t.shorts, t.longs, NULL)) != -1) {
        if (value == '?' || value == ':')
            return bad_option(c, value, argv);
        if (is_letter(value))
            value = index_of_letter(c->command, value);
        if (value >= GLOBAL)
            r = set_global(c, &global_options[value - GLOBAL], optarg);
        else
            c->values[value] = optarg ? optarg : "";
    }
    *ret_first = optind;
    return r;
}

static int check_count(const struct command *command, int n)
{
    char buf[SYNOPSIS_SIZE];

    if (n >= command->min_args && (command->max_args == ANY_NUMBER || n <= command->max_args))
        return 0;
    return ctl_fail(EXIT_USAGE, "too %s arguments: kvctl %s; see `kvctl %s --help`",
                    n < command->min_args ? "few" : "many", synopsis(command, buf), command->name);
}

/* ---- running */

static int run_command(struct ctl *c, int argc, char **argv)
{
    int words, first, r;

    c->command = find_command(argv, argc, &words);
    if (!c->command) {
        const struct command *longer = find_beginning(argv[0]);

        return longer ? ctl_fail(EXIT_USAGE, "did you mean \"%s\"?", longer->name)
                      : unknown_command(argv[0]);
    }
    argc -= words - 1;
    argv += words - 1;
    r = parse_options(c, argc, argv, &first);
    if (r)
        return r;
    if (c->help) {
        print_command_help(c->command);
        return 0;
    }
    r = check_count(c->command, argc - first);
    return r ? r : c->command->run(c, argv + first, argc - first);
}

static int run(struct ctl *c, int argc, char **argv)
{
    int first, r = parse_options(c, argc, argv, &first);

    if (r)
        return r;
    if (c->version) {
        puts("kvctl " KVD_VERSION);
        return 0;
    }
    if (first < argc)
        return run_command(c, argc - first, argv + first);
    if (c->help) {
        print_help();
        return 0;
    }
    return ctl_fail(EXIT_USAGE, "what shall it be? `kvctl --help` lists the commands");
}

int main(int argc, char **argv)
{
    const char *no_color = getenv("NO_COLOR");
    struct ctl c = {
        .headers = true,
        .color = isatty(STDOUT_FILENO) && !(no_color && *no_color),
        .timeout_ms = 10000,
    };
    int r;

    setlocale(LC_CTYPE, ""); /* widths of characters; numbers stay as they are */
    r = run(&c, argc, argv);
    ctl_disconnect(&c);
    if ((fflush(stdout) || ferror(stdout)) && r == 0)
        r = ctl_fail(EXIT_FAILED, "cannot write the output: %m");
    return r;
}
