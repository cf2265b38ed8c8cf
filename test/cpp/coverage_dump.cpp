// Writes the counters of the lines that ran. Only the module of `make coverage` has it.
//
// A child of the fork server ends with os._exit, which skips what libgcov does at the end of a process.

extern "C" void __gcov_dump();

extern "C" __attribute__((visibility("default"))) void torch_xla_donate_dump_coverage() { __gcov_dump(); }
