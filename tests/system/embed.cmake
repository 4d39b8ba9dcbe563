# SPDX-License-Identifier: Apache-2.0
# Installs the build tree into a scratch prefix, then builds and runs examples/embed against it as an outsider would.

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGV}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
set(flags "")
if(SANITIZE)
  set(flags "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}")
endif()
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix ${flags})
run(${CMAKE_COMMAND} --build ${WORK}/build)
file(MAKE_DIRECTORY ${WORK}/run)
execute_process(COMMAND ${WORK}/build/embed ${WORK}/run/store WORKING_DIRECTORY ${WORK}/run RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "examples/embed ended with ${result}")
endif()
