# SPDX-License-Identifier: Apache-2.0
# A program that takes hoist in by add_subdirectory(), as FetchContent does: nothing of its own build changes. Configures
# all and compiles the program's file; what it links is the libraries that the rest of the suite has built.

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGV}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
file(WRITE ${WORK}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(embedder LANGUAGES CXX)
add_subdirectory(${SOURCE} hoist)
add_executable(program main.cpp)
target_link_libraries(program PRIVATE hoist::hoist)
install(TARGETS program)
")
file(WRITE ${WORK}/main.cpp "#include <hoist/hoist.hpp>
int main() {
  const auto config = hoist::Config::parse(\"{}\", \"text\");
  hoist::Runtime runtime(config.runtime);
  hoist::Model model;
  model.add_unit(\"layer\", {{.name = \"weight\", .shape = {4, 4}}});
  const auto engine = hoist::Engine::create(runtime, config.engine, model, hoist::Initializer());
  return engine.model().parameter_count() == 16 ? 0 : 1;
}
")
set(configure ${CMAKE_COMMAND} -S ${WORK} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DHOIST_WITH_CUDA=OFF)

run(${configure})
if(NOT output MATCHES "hoist is being built without optimisation")
  message(FATAL_ERROR "an empty build type was not said\n${output}")
endif()
if(NOT output MATCHES "PYTHON: left out, as in every build that embeds hoist")
  message(FATAL_ERROR "an embedded build looked for Python\n${output}")
endif()
file(STRINGS ${WORK}/build/CMakeCache.txt type REGEX "^CMAKE_BUILD_TYPE:")
if(NOT type STREQUAL "CMAKE_BUILD_TYPE:STRING=")
  message(FATAL_ERROR "the build type of the program was set: ${type}")
endif()

run(${configure} -DCMAKE_BUILD_TYPE=Release)
foreach(folder include bin)
  if(EXISTS ${WORK}/build/${folder})
    message(FATAL_ERROR "hoist made the folder ${folder} in the program's build")
  endif()
endforeach()
foreach(option CLI EXAMPLES BENCH TESTS)
  file(STRINGS ${WORK}/build/CMakeCache.txt value REGEX "^HOIST_BUILD_${option}:")
  if(NOT value STREQUAL "HOIST_BUILD_${option}:BOOL=OFF")
    message(FATAL_ERROR "an embedded build has ${value}")
  endif()
endforeach()
file(GLOB scripts ${WORK}/build/hoist/cmake_install.cmake ${WORK}/build/hoist/*/cmake_install.cmake)
foreach(script IN LISTS scripts)
  file(STRINGS ${script} installed REGEX "^ *file\\(INSTALL")
  if(installed)
    message(FATAL_ERROR "hoist is installed with the program: ${script}: ${installed}")
  endif()
endforeach()
file(GLOB_RECURSE together ${WORK}/build/hoist/unity_0_cxx.cxx)
if(NOT together)
  message(FATAL_ERROR "an embedded build compiles each file alone, unlike the build that is tested")
endif()
run(${CMAKE_COMMAND} --build ${WORK}/build --target CMakeFiles/program.dir/main.cpp.o)
file(REMOVE_RECURSE ${WORK})
