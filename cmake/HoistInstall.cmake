# SPDX-License-Identifier: Apache-2.0
# The install tree: libraries, the headers that a program reads with those they include, and a package that
# find_package(hoist) understands.
# A program links hoist::hoist. One that takes hoist in by add_subdirectory() installs nothing of it (HOIST_INSTALL).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

get_property(modules GLOBAL PROPERTY HOIST_MODULES)

add_library(hoist INTERFACE)
add_library(hoist::hoist ALIAS hoist)
set(module_targets "")
foreach(module IN LISTS modules)
  target_link_libraries(hoist INTERFACE hoist_${module})
endforeach()
if(NOT HOIST_INSTALL)
  return()
endif()

foreach(module IN LISTS modules)
  list(APPEND module_targets hoist_${module})
endforeach()

# What a program reads: hoist.hpp, and for ranks that the program joins itself, comm/.
set(open hoist.hpp comm/communicator.hpp comm/mpi.hpp comm/transport.hpp)
set(headers "")
while(open)
  list(POP_FRONT open header)
  if(header IN_LIST headers)
    continue()
  endif()
  list(APPEND headers ${header})
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${CMAKE_CURRENT_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/hoist/${folder})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${header})
  file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/${header} includes REGEX "^#include <hoist/")
  foreach(include IN LISTS includes)
    string(REGEX REPLACE "^#include <hoist/([^>]+)>.*" "\\1" include "${include}")
    list(APPEND open ${include})
  endforeach()
endwhile()
if(TARGET hoist_nccl)
  list(APPEND module_targets hoist_nccl)
endif()

install(TARGETS hoist ${module_targets} EXPORT hoistTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT hoistTargets NAMESPACE hoist:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hoist)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/hoistConfig.cmake.in
  ${PROJECT_BINARY_DIR}/hoistConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hoist)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/hoistConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/hoistConfig.cmake ${PROJECT_BINARY_DIR}/hoistConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hoist)
