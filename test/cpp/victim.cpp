// A library whose imports the tests patch. CMakeLists.txt builds it once per link mode; a VICTIM_ macro selects
// victim_add's call.
#include "callee.h"

using Function = int (*)(const void*, int, int);

extern "C" {

// The index is only known at run time. If the compiler knew the entry, it would call the function directly.
#if defined(VICTIM_BY_TABLE) || defined(VICTIM_BY_BOTH)
extern const Function victim_table[2];
extern int victim_table_index;
const Function victim_table[2] = {callee_add, nullptr};
int victim_table_index = 0;
#endif

// An absolute relocation of an imported symbol with an addend, which is not a function slot.
extern const int* const victim_second_value = &callee_values[1];

int victim_add_by_table(int a, int b);
int victim_add(int a, int b);
int victim_add_twice(int a, int b);
int victim_multiply(int a, int b) { return callee_multiply(nullptr, a, b); }

#if defined(VICTIM_BY_TABLE)
int victim_add(int a, int b) { return victim_table[victim_table_index](nullptr, a, b); }
#elif defined(VICTIM_BY_VTABLE)
// Inherits Add, so this library's vtable holds a pointer into the other library.
struct Derived : Adder {
  int Scale() const override;
};
int Derived::Scale() const { return 1; }
extern Adder* victim_adder;
static Derived derived;
Adder* victim_adder = &derived;
int victim_add(int a, int b) { return victim_adder->Add(a, b); }
#else
int victim_add(int a, int b) { return callee_add(nullptr, a, b); }
#endif

// A call of an own exported function passes a slot, too, although the library does not import it.
int victim_add_twice(int a, int b) { return 2 * victim_add(a, b); }

#if defined(VICTIM_BY_BOTH)
int victim_add_by_table(int a, int b) { return victim_table[victim_table_index](nullptr, a, b); }
#endif
}
