// Checks of the arguments of reading rows from a file.
#ifndef BATON_OPS_CSRC_READ_ARGUMENTS_H_
#define BATON_OPS_CSRC_READ_ARGUMENTS_H_

#include "arguments.h"

namespace baton_ops {

// Reads descriptor, offset, rows, row_items, pitch_bytes, stored, block_bytes, threads, out, told.
void RunReadRows(ArgumentReader args);
constexpr int32_t kReadRowsArguments = 10;

}  // namespace baton_ops

#endif  // BATON_OPS_CSRC_READ_ARGUMENTS_H_
