#include "bench.h"
#define S(x) int x(struct bench*b){(void)b;return -38;}
S(case_scaling) S(case_publish) S(case_round_trip) S(case_evict) S(case_rest) S(case_death) S(case_populate) S(case_hash) S(case_remote)
