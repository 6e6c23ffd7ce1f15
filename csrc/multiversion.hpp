#pragma once
// The one macro that makes a function exist in several CPU levels.
//
// Release wheels are compiled for baseline x86-64, whose vectors are 16 bytes wide. A loop marked
// PYSTALE_MULTIVERSION_CLONES is also compiled for x86-64-v3 (AVX2) and x86-64-v4 (AVX-512); the dynamic
// linker picks one when the module loads. Helpers must be inlined into the clone, or they run at the baseline.
// CMake defines PYSTALE_MULTIVERSION only where the toolchain supports it (see CMakeLists.txt).

#if defined(PYSTALE_MULTIVERSION)
#define PYSTALE_MULTIVERSION_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PYSTALE_MULTIVERSION_CLONES
#endif
