/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Enough of Criterion to run a test file as a plain program, one test after the other in one process:
 * for sanitizers under which Criterion's own sandbox does not come up (ThreadSanitizer). Its folder
 * comes before the real one in the include path; there is no library.
 */
#ifndef PLAIN_CRITERION_H
#define PLAIN_CRITERION_H

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct plain_suite {
    void (*init)(void), (*fini)(void); /* by name, as Criterion's */
    double timeout;                    /* ignored: meson has one for the program */
    const char *name;
    struct plain_suite *next;
};

struct plain_test {
    const char *suite, *name;
    void (*run)(void);
    struct plain_test *next;
};

/* Weak: a test of several files includes this several times. */
__attribute__((weak)) struct plain_test *plain_tests;
__attribute__((weak)) struct plain_suite *plain_suites;
__attribute__((weak)) jmp_buf plain_skip; /* to the end of the running test */

#define TestSuite(suite, ...)                                                                      \
    __attribute__((constructor)) static void suite##_suite_add(void)                               \
    {                                                                                              \
        static struct plain_suite self = {__VA_ARGS__};                                            \
        self.name = #suite;                                                                        \
        self.next = plain_suites;                                                                  \
        plain_suites = &self;                                                                      \
    }                                                                                              \
    struct plain_suite

#define Test(suite, test, ...)                                                                     \
    static void suite##_##test(void);                                                              \
    __attribute__((constructor)) static void suite##_##test##_add(void)                            \
    {                                                                                              \
        static struct plain_test self = {#suite, #test, suite##_##test, NULL};                     \
        self.next = plain_tests;                                                                   \
        plain_tests = &self;                                                                       \
    }                                                                                              \
    static void suite##_##test(void)

#define cr_assert_fail(...)                                                                        \
    do {                                                                                           \
        fprintf(stderr, "%s:%d: failed: ", __FILE__, __LINE__);                                    \
        fprintf(stderr, " " __VA_ARGS__);                                                          \
        fputc('\n', stderr);                                                                       \
        abort();                                                                                   \
    } while (0)
#define cr_assert(condition, ...)                                                                  \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s ", #condition);                                                    \
            cr_assert_fail(__VA_ARGS__);                                                           \
        }                                                                                          \
    } while (0)
#define cr_assert_not(condition, ...)   cr_assert(!(condition), ##__VA_ARGS__)
#define cr_assert_eq(a, b, ...)         cr_assert((a) == (b), ##__VA_ARGS__)
#define cr_assert_neq(a, b, ...)        cr_assert((a) != (b), ##__VA_ARGS__)
#define cr_assert_lt(a, b, ...)         cr_assert((a) < (b), ##__VA_ARGS__)
#define cr_assert_gt(a, b, ...)         cr_assert((a) > (b), ##__VA_ARGS__)
#define cr_assert_leq(a, b, ...)        cr_assert((a) <= (b), ##__VA_ARGS__)
#define cr_assert_geq(a, b, ...)        cr_assert((a) >= (b), ##__VA_ARGS__)
#define cr_assert_null(a, ...)          cr_assert(!(a), ##__VA_ARGS__)
#define cr_assert_not_null(a, ...)      cr_assert((a) != NULL, ##__VA_ARGS__)
#define cr_assert_arr_eq(a, b, n, ...)  cr_assert(memcmp((a), (b), (n)) == 0, ##__VA_ARGS__)
#define cr_assert_arr_neq(a, b, n, ...) cr_assert(memcmp((a), (b), (n)) != 0, ##__VA_ARGS__)
#define cr_assert_str_eq(a, b, ...)     cr_assert(strcmp((a), (b)) == 0, ##__VA_ARGS__)
#define cr_log_info(...)                printf(__VA_ARGS__)
#define cr_skip_test(...)                                                                          \
    do {                                                                                           \
        printf("skipped: " __VA_ARGS__);                                                           \
        putchar('\n');                                                                             \
        longjmp(plain_skip, 1);                                                                    \
    } while (0)

static inline const struct plain_suite *plain_suite_of(const struct plain_test *test)
{
    static const struct plain_suite none = {.init = NULL};

    for (const struct plain_suite *s = plain_suites; s; s = s->next)
        if (strcmp(s->name, test->suite) == 0)
            return s;
    return &none;
}

__attribute__((weak)) int main(void)
{
    volatile size_t n = 0; /* changed between setjmp() and longjmp() */

    for (struct plain_test *volatile test = plain_tests; test; test = test->next, n++) {
        const struct plain_suite *volatile suite = plain_suite_of(test);

        printf("%s::%s\n", test->suite, test->name);
        fflush(stdout);
        if (suite->init)
            suite->init();
        if (setjmp(plain_skip) == 0)
            test->run();
        if (suite->fini)
            suite->fini();
    }
    printf("%zu passed, 0 failed\n", n);
    return n ? 0 : 1;
}

#endif
