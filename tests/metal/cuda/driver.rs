//! The functions of the CUDA driver that are needed, found when the program runs.
//!
//! What they are given is in the unsafe code of `gpu.rs` and `memory.rs`; here every failure becomes an error.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::transmute_copy;
use std::ptr::null;

use tinyvllm::{Error, Result};

/// An object of the driver's.
pub(super) type Handle = *mut c_void;
/// An address in the device's memory.
pub(super) type Address = u64;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(object: *mut c_void, name: *const c_char) -> *mut c_void;
}
const RTLD_NOW: c_int = 2;
const SUCCESS: c_int = 0;

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions, and the context in which they work.
        pub(super) struct Driver {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            /// The driver of this machine.
            pub(super) fn load() -> Result<Self> {
                // SAFETY: the name is a string; the driver's initialisers ask nothing of us.
                let library = unsafe { dlopen(c"libcuda.so.1".as_ptr(), RTLD_NOW) };
                if library.is_null() {
                    return Err(Error::internal("libcuda.so.1 is not installed"));
                }
                Ok(Self {
                    $($name: {
                        let symbol = CString::new($symbol).map_err(|error| Error::internal(error.to_string()))?;
                        // SAFETY: the library is loaded for good, and the name is a string.
                        let address = unsafe { dlsym(library, symbol.as_ptr()) };
                        if address.is_null() {
                            return Err(Error::internal(concat!("the driver has no ", $symbol)));
                        }
                        // SAFETY: the function of this name has this type, in every version of the driver.
                        unsafe { transmute_copy(&address) }
                    },)*
                })
            }
        }
    };
}

functions! {
    init: "cuInit" (c_uint);
    device: "cuDeviceGet" (*mut c_int, c_int);
    device_name: "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_memory: "cuDeviceTotalMem_v2" (*mut usize, c_int);
    retain_context: "cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    set_context: "cuCtxSetCurrent" (Handle);
    synchronize: "cuCtxSynchronize" ();
    allocate: "cuMemAlloc_v2" (*mut Address, usize);
    free: "cuMemFree_v2" (Address);
    fill: "cuMemsetD8Async" (Address, u8, usize, Handle);
    copy_to_device: "cuMemcpyHtoD_v2" (Address, *const c_void, usize);
    copy_to_host: "cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
    copy_on_device: "cuMemcpyDtoDAsync_v2" (Address, Address, usize, Handle);
    load_module: "cuModuleLoadData" (*mut Handle, *const c_void);
    function: "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    variable: "cuModuleGetGlobal_v2" (*mut Address, *mut usize, Handle, *const c_char);
    function_attribute: "cuFuncGetAttribute" (*mut c_int, c_int, Handle);
    launch: "cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
        *mut *mut c_void
    );
    new_event: "cuEventCreate" (*mut Handle, c_uint);
    record_event: "cuEventRecord" (Handle, Handle);
    wait_for_event: "cuEventSynchronize" (Handle);
    elapsed_time: "cuEventElapsedTime" (*mut f32, Handle, Handle);
    destroy_event: "cuEventDestroy_v2" (Handle);
    error_string: "cuGetErrorString" (c_int, *mut *const c_char);
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Driver")
    }
}

impl Driver {
    /// The result of a call.
    pub(super) fn check(&self, what: &str, result: c_int) -> Result<()> {
        if result == SUCCESS {
            return Ok(());
        }
        let mut text: *const c_char = null();
        // SAFETY: the text that is written is the driver's own.
        let known = unsafe { (self.error_string)(result, &raw mut text) };
        let text = if known == SUCCESS && !text.is_null() {
            // SAFETY: as above, a string.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            "unknown error".to_owned()
        };
        Err(Error::internal(format!("{what}: {text} ({result})")))
    }
}
