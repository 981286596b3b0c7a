// Included first when a wheel is built (tools/dist.py): functions that newer glibc gave a new version are taken in their oldest one,
// so that a library linked on a newer system loads on glibc 2.28. Only names; nothing is declared.
#pragma once
#if defined(__x86_64__)
#define KHOT_OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define KHOT_OLDEST "GLIBC_2.17"
#else
#error "glibc_2_28.h knows x86_64 and aarch64"
#endif
#define KHOT_TAKE_OLDEST(name) __asm__(".symver " #name "," #name "@" KHOT_OLDEST)
// New in 2.29: no more error handling in the wrapper. The old ones compute the same values.
KHOT_TAKE_OLDEST(exp);
KHOT_TAKE_OLDEST(exp2);
KHOT_TAKE_OLDEST(log);
KHOT_TAKE_OLDEST(log2);
KHOT_TAKE_OLDEST(pow);
// New in 2.34: moved from libdl and libpthread into libc.
KHOT_TAKE_OLDEST(dlsym);
KHOT_TAKE_OLDEST(pthread_create);
KHOT_TAKE_OLDEST(pthread_join);
