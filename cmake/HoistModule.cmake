# SPDX-License-Identifier: Apache-2.0
# One call per folder: a static library that lists the modules it may use.

include(GNUInstallDirs)

set(HOIST_WARNINGS -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor -Woverloaded-virtual
  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND HOIST_WARNINGS -Wno-restrict)  # false on std::string operator+ (GCC bug 105651)
endif()
if(CMAKE_UNITY_BUILD AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  list(APPEND HOIST_WARNINGS -Wno-subobject-linkage)  # takes the .cpp files that a unity build includes for headers
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)
  list(APPEND HOIST_WARNINGS -Wthread-safety -Werror=thread-safety)  # core/mutex.hpp
endif()
if(HOIST_WARNINGS_AS_ERRORS)
  list(APPEND HOIST_WARNINGS -Werror)
endif()

# hoist_compile_rules(TARGET): the warnings and floating-point rules of every target of ours.
# -ffp-contract=off: GCC contracts a*b+c across intrinsics, and then instruction sets disagree in the last bit.
# -O2 in Release, where CMake says -O3: only kernels run faster for it (hoist_kernel_sources), and the rest compiles faster.
function(hoist_compile_rules target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${HOIST_WARNINGS} -ffp-contract=off $<$<CONFIG:Release>:-O2>>)
endfunction()

# hoist_kernel_sources(FILE...): files of this folder that Highway compiles once per instruction set. A unity build cannot
# combine them, because each includes itself. The sets: the baseline, AVX2 and AVX3 (since Highway 1.0.4 also sets that
# extend AVX3); on ARM, NEON. Processors with SSSE3 or SSE4 alone were made before 2013; they run the baseline. No kernel
# keeps vectors of unknown length (SVE) in a structure, which GCC does not compile. The address and undefined sanitizers
# test the baseline and AVX2. The thread sanitizer tests AVX2 alone: memory accesses are the same in every set, and Clang
# compiles AVX2 in an eighth of the baseline's time. -O2 takes less than half of -O1's time: 61 s instead of 143 s for
# update.cpp.
function(hoist_kernel_sources)
  set(disabled HWY_SSSE3 HWY_SSE4 HWY_SVE HWY_SVE2 HWY_SVE_256 HWY_SVE2_128)
  if(HOIST_SANITIZE)
    list(APPEND disabled HWY_AVX3 "(HWY_AVX3-1)")  # lower bits: the sets that extend it, in whichever version
  endif()
  if(HOIST_SANITIZE STREQUAL "thread" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -march=haswell -O2)
  endif()
  list(JOIN disabled "|" disabled)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS "HWY_DISABLED_TARGETS=(${disabled})")
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS $<$<CONFIG:Release>:-O3>)
endfunction()

# hoist_module(NAME SOURCES ... USES module... LINKS target... PRIVATE_LINKS target...)
function(hoist_module name)
  cmake_parse_arguments(MODULE "" "" "SOURCES;USES;LINKS;PRIVATE_LINKS" ${ARGN})
  set(target hoist_${name})
  add_library(${target} STATIC ${MODULE_SOURCES})
  add_library(hoist::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  hoist_compile_rules(${target})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(module IN LISTS MODULE_USES)
    target_link_libraries(${target} PUBLIC hoist_${module})
  endforeach()
  target_link_libraries(${target} PUBLIC ${MODULE_LINKS} PRIVATE ${MODULE_PRIVATE_LINKS})
  set_property(GLOBAL APPEND PROPERTY HOIST_MODULES ${name})
endfunction()

# hoist_program(NAME SOURCES ... LINKS target...): one that tests start.
function(hoist_program name)
  cmake_parse_arguments(PROGRAM "" "" "SOURCES;LINKS" ${ARGN})
  add_executable(${name} ${PROGRAM_SOURCES})
  hoist_compile_rules(${name})
  target_link_libraries(${name} PRIVATE ${PROGRAM_LINKS})
endfunction()

# hoist_test(NAME SOURCES ... USES module... LINKS target... LABELS label... [SHARDS n] [TIMEOUT seconds] [PROCESSORS n]
#   [COST seconds])
# One GoogleTest program. ctest starts it once, or SHARDS times with a part of its tests each: NAME, or NAME.1 to NAME.n.
# The output names the tests that failed; build/<preset>/skipped lists those that were skipped (tests/support/main.cpp).
# PROCESSORS: how many the program keeps busy, where it is more than one. COST: about how long the longest ones take; ctest
# starts these first, so that none of them is left for the end.
function(hoist_test name)
  cmake_parse_arguments(T "" "SHARDS;TIMEOUT;PROCESSORS;COST" "SOURCES;USES;LINKS;LABELS" ${ARGN})
  set(target ${name}_test)
  add_executable(${target} ${T_SOURCES})
  hoist_compile_rules(${target})
  foreach(module IN LISTS T_USES)
    target_link_libraries(${target} PRIVATE hoist_${module})
  endforeach()
  target_link_libraries(${target} PRIVATE ${T_LINKS} hoist_test_main)
  target_include_directories(${target} PRIVATE ${PROJECT_BINARY_DIR}/include)
  target_precompile_headers(${target} REUSE_FROM hoist_test_headers)
  if(NOT T_LABELS)
    set(T_LABELS unit)
  endif()
  if(NOT T_TIMEOUT)
    set(T_TIMEOUT 1800)
  endif()
  if(NOT T_PROCESSORS)
    set(T_PROCESSORS 1)
  endif()
  if(NOT T_SHARDS)
    set(T_SHARDS 1)
  endif()
  if(NOT T_COST)
    set(T_COST 0)
  endif()
  foreach(shard RANGE 1 ${T_SHARDS})
    set(entry ${name})
    set(environment "HOIST_TEST_SKIPS=${PROJECT_BINARY_DIR}/skipped/${name}.${shard}.txt")
    if(HOIST_HAVE_PYTHON)
      list(APPEND environment "HOIST_TEST_PYTHON=${Python_EXECUTABLE}")
    endif()
    if(T_SHARDS GREATER 1)
      set(entry ${name}.${shard})
      math(EXPR index "${shard} - 1")
      list(APPEND environment "GTEST_TOTAL_SHARDS=${T_SHARDS}" "GTEST_SHARD_INDEX=${index}")
    endif()
    add_test(NAME ${entry} COMMAND ${target})
    set_tests_properties(${entry} PROPERTIES LABELS "${T_LABELS}" TIMEOUT ${T_TIMEOUT} PROCESSORS ${T_PROCESSORS}
      COST ${T_COST} SKIP_RETURN_CODE 77 ENVIRONMENT "${environment}")
  endforeach()
endfunction()

# hoist_mpi_run(TEST RANKS PROGRAM ARGS...): more ranks than cores, unbound, and as root where that is who runs the
# tests (the variables mean nothing to anyone else). Containers forbid the single-copy system calls; without the
# setting every rank warns of it.
function(hoist_mpi_run test ranks program)
  add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(${test} PROPERTIES LABELS mpi TIMEOUT 300 PROCESSORS 2
    ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_rmaps_base_oversubscribe=1;OMPI_MCA_hwloc_base_binding_policy=none;OMPI_MCA_btl_vader_single_copy_mechanism=none")
endfunction()
