# SPDX-License-Identifier: Apache-2.0
# Finds every dependency once; modules link the imported targets named here.
# Required parts that are missing end the configure step, all of them at once, with the packages to install; optional
# ones are reported.

find_package(Threads REQUIRED)

set(_missing "")
# hoist_need(FOUND PACKAGE): notes the distribution's package of a required part that was not found.
macro(hoist_need found package)
  if(NOT ${found})
    list(APPEND _missing ${package})
  endif()
endmacro()

find_package(TBB QUIET)
hoist_need(TBB_FOUND libtbb-dev)
find_package(fmt QUIET)
hoist_need(fmt_FOUND libfmt-dev)
find_package(spdlog QUIET)
hoist_need(spdlog_FOUND libspdlog-dev)
find_package(nlohmann_json QUIET)
hoist_need(nlohmann_json_FOUND nlohmann-json3-dev)

find_package(PkgConfig QUIET)
hoist_need(PkgConfig_FOUND pkg-config)
foreach(part "LIBURING liburing" "HWLOC hwloc" "HWY libhwy" "XXHASH libxxhash")
  separate_arguments(part)
  list(POP_FRONT part prefix module)
  if(PkgConfig_FOUND)
    pkg_check_modules(${prefix} QUIET IMPORTED_TARGET ${module})
  endif()
  string(REGEX REPLACE "^lib" "" name ${module})
  hoist_need(${prefix}_FOUND lib${name}-dev)
endforeach()

if(_missing)
  list(JOIN _missing " " _missing)
  message(FATAL_ERROR "hoist needs libraries that were not found. On Debian and its relatives:\n"
    "  apt-get install ${_missing}\n"
    "scripts/install-deps.sh installs everything that a whole build uses, on Fedora, too; docs/install.md has Fedora's names.")
endif()

# hoist_optional(PART FOUND DETAIL MISSING_HINT): settles HOIST_HAVE_<PART> from HOIST_WITH_<PART>.
macro(hoist_optional part found detail hint)
  if(HOIST_WITH_${part} STREQUAL "OFF")
    set(HOIST_HAVE_${part} OFF)
    set(HOIST_NOTE_${part} "off (HOIST_WITH_${part}=OFF)")
  elseif(${found})
    set(HOIST_HAVE_${part} ON)
    set(HOIST_NOTE_${part} "${detail}")
  elseif(HOIST_WITH_${part} STREQUAL "AUTO")
    set(HOIST_HAVE_${part} OFF)
    set(HOIST_NOTE_${part} "not found, left out (${hint})")
  else()
    message(FATAL_ERROR "HOIST_WITH_${part}=ON, but ${part} was not found: ${hint}")
  endif()
endmacro()

set(_cuda_found OFF)
if(NOT HOIST_WITH_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      # Code for Ampere and Hopper, and PTX of the latter for what comes after.
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    endif()
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know how to ask nvcc for it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
      list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
    endif()
    find_package(CUDAToolkit)
    # Older ones do not read C++20, which the kernels share with the CPU's text.
    if(TARGET CUDA::cudart_static AND CUDAToolkit_VERSION VERSION_GREATER_EQUAL 12.0)
      set(_cuda_found ON)
    endif()
  endif()
endif()
hoist_optional(CUDA _cuda_found "toolkit ${CUDAToolkit_VERSION}" "install the CUDA Toolkit, 12.0 or newer, and put nvcc on the PATH")

set(_nccl_found OFF)
if(HOIST_HAVE_CUDA AND NOT HOIST_WITH_NCCL STREQUAL "OFF")
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib ${CUDAToolkit_LIBRARY_ROOT}/lib64)
  if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
    add_library(hoist_nccl INTERFACE)
    target_include_directories(hoist_nccl SYSTEM INTERFACE ${NCCL_INCLUDE_DIR})
    target_link_libraries(hoist_nccl INTERFACE ${NCCL_LIBRARY})
    set(_nccl_found ON)
  endif()
endif()
hoist_optional(NCCL _nccl_found "${NCCL_LIBRARY}" "install NCCL beside the CUDA Toolkit")

set(_mpi_found OFF)
if(NOT HOIST_WITH_MPI STREQUAL "OFF")
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI QUIET COMPONENTS CXX)
  set(_mpi_found ${MPI_CXX_FOUND})
endif()
hoist_optional(MPI _mpi_found "MPI ${MPI_CXX_VERSION}" "install libopenmpi-dev")

# The extension module is built by the Python that will import it: the one whose nanobind is found. Only a whole build
# looks for it, not one that embeds hoist.
set(_python_found OFF)
if(PROJECT_IS_TOP_LEVEL AND NOT HOIST_WITH_PYTHON STREQUAL "OFF")
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
  if(Python_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(nanobind_ROOT)
      find_package(nanobind CONFIG QUIET)
      set(_python_found ${nanobind_FOUND})
    endif()
  endif()
endif()
hoist_optional(PYTHON _python_found "${Python_EXECUTABLE} ${Python_VERSION}, nanobind ${nanobind_VERSION}"
  "pip install nanobind; -DPython_EXECUTABLE=... names an interpreter")

function(hoist_print_summary)
  message(STATUS "hoist ${PROJECT_VERSION}, ${CMAKE_BUILD_TYPE}${HOIST_SANITIZE}")
  foreach(part CUDA NCCL MPI PYTHON)
    message(STATUS "  ${part}: ${HOIST_NOTE_${part}}")
  endforeach()
endfunction()
