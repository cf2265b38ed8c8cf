// Writes the counters of the lines that ran. Only the module of `make coverage` has it.
//
// A child of the fork server ends with os._exit, which skips libgcov's exit handler.

extern "C" void __gcov_dump();

extern "C" __attribute__((visibility("default"))) void torch_xla_donate_dump_coverage() { __gcov_dump(); }
