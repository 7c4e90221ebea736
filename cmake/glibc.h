// exp, log and log2 as every glibc has them, whose newest versions are of 2.29: wheels are for 2.28, too.

#pragma once

#include <cmath>

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver log2, log2@GLIBC_2.2.5");
#endif
