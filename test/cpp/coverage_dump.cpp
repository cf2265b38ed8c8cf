// Writes the counters of the lines that ran. Only the module and the test programs of `make coverage` have it.
//
// The children of the tests end with _exit, which skips libgcov's exit handler.

extern "C" void __gcov_dump();

extern "C" __attribute__((visibility("default"))) void torch_xla_donate_dump_coverage() { __gcov_dump(); }
