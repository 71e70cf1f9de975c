// Launches the kernel that chooses among candidates on the CPU, row after row.
#include "ptx.h"

#include "choose.cu"

constexpr auto kernel = choose_tokens;

#include "rows.h"
