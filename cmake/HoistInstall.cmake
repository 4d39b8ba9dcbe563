# SPDX-License-Identifier: Apache-2.0
# The install tree: libraries, headers under <hoist/module/...>, and a package that find_package(hoist) understands.
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
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/${module}/
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/hoist/${module}
    FILES_MATCHING PATTERN "*.hpp" PATTERN "detail" EXCLUDE)
endforeach()
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
