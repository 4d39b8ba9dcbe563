# SPDX-License-Identifier: Apache-2.0
# The install tree: libraries, headers under <hoist/room/...>, and a package that find_package(hoist) understands.
# A program links hoist::hoist. One that takes hoist in by add_subdirectory() installs nothing of it (HOIST_INSTALL).

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

get_property(rooms GLOBAL PROPERTY HOIST_ROOMS)

add_library(hoist INTERFACE)
add_library(hoist::hoist ALIAS hoist)
set(room_targets "")
foreach(room IN LISTS rooms)
  target_link_libraries(hoist INTERFACE hoist_${room})
endforeach()
if(NOT HOIST_INSTALL)
  return()
endif()

foreach(room IN LISTS rooms)
  list(APPEND room_targets hoist_${room})
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/${room}/
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/hoist/${room}
    FILES_MATCHING PATTERN "*.hpp" PATTERN "detail" EXCLUDE)
endforeach()
if(TARGET hoist_nccl)
  list(APPEND room_targets hoist_nccl)
endif()

install(TARGETS hoist ${room_targets} EXPORT hoistTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT hoistTargets NAMESPACE hoist:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hoist)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/hoistConfig.cmake.in
  ${PROJECT_BINARY_DIR}/hoistConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hoist)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/hoistConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/hoistConfig.cmake ${PROJECT_BINARY_DIR}/hoistConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/hoist)
