// The functions that the tests intercept.
#include "callee.h"

int callee_add(const void*, int a, int b) { return a + b; }
int callee_multiply(const void*, int a, int b) { return a * b; }
const int callee_values[2] = {1, 2};

Adder::~Adder() = default;
int Adder::Add(int a, int b) const { return Scale() * (a + b); }
int Adder::Scale() const { return 1; }
