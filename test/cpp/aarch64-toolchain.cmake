# Cross-compiles the ctest suite for aarch64 and runs it under user-mode emulation. Not part of the default build.
#
# Debian and Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user
#   cmake -S test/cpp -B build-aarch64 -DCMAKE_TOOLCHAIN_FILE=aarch64-toolchain.cmake
#   cmake --build build-aarch64 && ctest --test-dir build-aarch64 --output-on-failure
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)
