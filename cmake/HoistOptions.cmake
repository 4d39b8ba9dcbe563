# SPDX-License-Identifier: Apache-2.0
# Build options. Optional parts take AUTO (use it when found), ON (an error when missing) or OFF.

foreach(part CUDA NCCL MPI PYTHON)
  set(HOIST_WITH_${part} AUTO CACHE STRING "Build with ${part}: AUTO, ON or OFF")
  set_property(CACHE HOIST_WITH_${part} PROPERTY STRINGS AUTO ON OFF)
endforeach()

option(HOIST_BUILD_CLI "Build the hoist command line tool" ${PROJECT_IS_TOP_LEVEL})
option(HOIST_BUILD_EXAMPLES "Build hoist-gpt" ${PROJECT_IS_TOP_LEVEL})
option(HOIST_BUILD_BENCH "Build the benchmarks" ${PROJECT_IS_TOP_LEVEL})
option(HOIST_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(HOIST_INSTALL "Install the library, its headers and its CMake package" ${PROJECT_IS_TOP_LEVEL})
option(HOIST_WARNINGS_AS_ERRORS "Treat compiler warnings as errors" OFF)
option(HOIST_FUZZ "Build the fuzzers, which need clang (preset fuzz)" OFF)
set(HOIST_SANITIZE "" CACHE STRING "Sanitizers for the whole build, as -fsanitize= takes them")
option(HOIST_SANITIZE_POINTERS "With undefined: look for null and misaligned pointers, too, which doubles the compile time" ON)

# Unoptimised kernels are tens of times slower. In a build that embeds hoist the type is the embedder's to choose.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
  else()
    message(WARNING "hoist is being built without optimisation: CMAKE_BUILD_TYPE is empty. Configure with "
      "-DCMAKE_BUILD_TYPE=Release (or RelWithDebInfo)")
  endif()
endif()

if(HOIST_SANITIZE)
  add_compile_options(-fsanitize=${HOIST_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${HOIST_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)  # which does not define GCC's names of them
    string(REGEX MATCH "address|thread" sanitizer "${HOIST_SANITIZE}")
    string(TOUPPER "${sanitizer}" sanitizer)
    add_compile_definitions(__SANITIZE_${sanitizer}__=1)
  endif()
  if(HOIST_SANITIZE MATCHES "undefined" AND NOT HOIST_SANITIZE_POINTERS)
    add_compile_options(-fno-sanitize=null,alignment)
  endif()
endif()

if(HOIST_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL Clang)
    message(FATAL_ERROR "HOIST_FUZZ needs clang, whose libFuzzer it uses: cmake --preset fuzz")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
