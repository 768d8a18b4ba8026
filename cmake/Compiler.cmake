# Warnings, sanitizers, ccache, processor.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

add_library(fenwick_options INTERFACE)
target_compile_features(fenwick_options INTERFACE cxx_std_20)
target_include_directories(fenwick_options INTERFACE "${PROJECT_SOURCE_DIR}/src")
target_compile_options(fenwick_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wno-missing-field-initializers>
  # The loops over floats are written to be vectorised; errno and traps of <cmath> are never read.
  $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno -fno-trapping-math>)
target_compile_options(fenwick_options INTERFACE
  # Line numbers for the profiler and compute-sanitizer; constexpr functions of the standard library in kernels.
  # No -Wpedantic for the host half: nvcc's own output is not pedantic.
  $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers>)
# fmt 9 takes nvcc for a compiler without constexpr and then contradicts itself.
target_compile_definitions(fenwick_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)
if(FENWICK_WERROR)
  target_compile_options(fenwick_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings -Xcompiler=-Werror>)
endif()
if(FENWICK_NATIVE AND NOT FENWICK_SANITIZE)
  target_compile_options(fenwick_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=native>)
endif()
if(FENWICK_FUZZ)  # coverage counters in all code; the targets themselves link libFuzzer's main
  target_compile_options(fenwick_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()
if(FENWICK_RACECHECK)
  target_compile_definitions(fenwick_options INTERFACE FENWICK_RACECHECK)
endif()
if(FENWICK_SANITIZE)
  string(REPLACE ";" "," sanitizers "${FENWICK_SANITIZE}")
  target_compile_options(fenwick_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  target_link_options(fenwick_options INTERFACE -fsanitize=${sanitizers})
endif()
