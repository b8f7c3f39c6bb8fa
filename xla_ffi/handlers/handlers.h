// The FFI handlers, as C symbols. Python wrappers: certjax/_ffi.py.
#ifndef CERTJAX_HANDLERS_HANDLERS_H_
#define CERTJAX_HANDLERS_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(certjax_append);
XLA_FFI_DECLARE_HANDLER_SYMBOL(certjax_dense_decode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(certjax_certified_decode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(certjax_project);
XLA_FFI_DECLARE_HANDLER_SYMBOL(certjax_scan);

#endif  // CERTJAX_HANDLERS_HANDLERS_H_
