// Launches the filters' kernel on the CPU: row after row, each by one cluster.
#include "ptx.h"

#include "filters.cu"

constexpr auto kernel = filter_rows;

#include "rows.h"
