// The library that the victims import from. Each function takes a pointer first, as a member function does. So one
// replacement works for functions and virtual members.
#pragma once

extern "C" {
int callee_add(const void* unused, int a, int b);
int callee_multiply(const void* unused, int a, int b);
extern const int callee_values[2];
}

struct Adder {
  virtual ~Adder();
  virtual int Add(int a, int b) const;  // _ZNK5Adder3AddEii
  virtual int Scale() const;
};
