//! NVIDIA's run-time compiler, which the driver does not include: finds it and compiles programs.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex, PoisonError};

use libloading::Library;

use crate::{Error, Result};

/// The variable that names its folder, searched instead of the system's.
pub(crate) const FOLDER_VARIABLE: &str = "TINYVLLM_CUDA_LIBRARIES";

/// The oldest version that supports `__grid_constant__` for all supported GPUs, and compiles on several threads.
const MIN_VERSION: (c_int, c_int) = (12, 0);

type Handle = *mut std::ffi::c_void;

/// The compiler.
#[derive(Debug)]
pub(super) struct Nvrtc {
    functions: Functions,
    /// Its version for messages, and for the cache: another compiler generates other code.
    pub(super) version: (c_int, c_int),
    /// Its supported architectures, as numbers like 90, in ascending order.
    architectures: Vec<c_int>,
}

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        /// Functions of the library, which stays loaded.
        #[derive(Debug)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            fn of(library: &Library) -> Result<Self, libloading::Error> {
                // SAFETY: the functions of these names have these types, in every version since 11.
                unsafe { Ok(Self { $($name: *library.get(concat!($symbol, "\0").as_bytes())?,)* }) }
            }
        }
    };
}

functions! {
    version: "nvrtcVersion" (*mut c_int, *mut c_int);
    num_architectures: "nvrtcGetNumSupportedArchs" (*mut c_int);
    architectures: "nvrtcGetSupportedArchs" (*mut c_int);
    create: "nvrtcCreateProgram"
        (*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
    compile: "nvrtcCompileProgram" (Handle, c_int, *const *const c_char);
    log_len: "nvrtcGetProgramLogSize" (Handle, *mut usize);
    log: "nvrtcGetProgramLog" (Handle, *mut c_char);
    cubin_len: "nvrtcGetCUBINSize" (Handle, *mut usize);
    cubin: "nvrtcGetCUBIN" (Handle, *mut c_char);
    ptx_len: "nvrtcGetPTXSize" (Handle, *mut usize);
    ptx: "nvrtcGetPTX" (Handle, *mut c_char);
    destroy: "nvrtcDestroyProgram" (*mut Handle);
}

/// The target of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// The code of a GPU, such as 90.
    Gpu(c_int),
    /// The driver's intermediate code for GPUs from this one on; used if the compiler does not know the GPU.
    From(c_int),
}

impl Target {
    /// The compiler's option for it.
    pub(super) fn option(self) -> String {
        match self {
            // Including instructions that later GPUs may lack.
            Self::Gpu(90) => "--gpu-architecture=sm_90a".to_owned(),
            Self::Gpu(number) => format!("--gpu-architecture=sm_{number}"),
            Self::From(number) => format!("--gpu-architecture=compute_{number}"),
        }
    }
}

/// A compiled program.
#[derive(Debug)]
pub(super) struct Compiled {
    /// The image for the driver.
    pub(super) image: Vec<u8>,
    /// The compiler's messages; for a valid program, only those that options requested.
    pub(super) messages: String,
}

static LOADED: LazyLock<Mutex<Option<&'static Nvrtc>>> = LazyLock::new(Mutex::default);

impl Nvrtc {
    /// The compiler of this machine. It is loaded once, and never unloaded.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unsupported`] with what to install if there is none.
    pub(super) fn load() -> Result<&'static Self> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(nvrtc) = *loaded {
            return Ok(nvrtc);
        }
        let nvrtc: &'static Self = Box::leak(Box::new(Self::find()?));
        *loaded = Some(nvrtc);
        Ok(nvrtc)
    }

    fn find() -> Result<Self> {
        let mut found = Vec::new();
        for path in candidates() {
            match Self::open(&path) {
                Ok(nvrtc) if nvrtc.version >= MIN_VERSION => return Ok(nvrtc),
                Ok(nvrtc) => {
                    let (major, minor) = nvrtc.version;
                    found.push(format!("{} is of CUDA {major}.{minor}", path.display()));
                }
                // A name that the system does not find needs no message; a file that does not load does.
                Err(error) if path.is_absolute() => found.push(error.to_string()),
                Err(_) => {}
            }
        }
        let (major, minor) = MIN_VERSION;
        let found = if found.is_empty() { String::new() } else { format!(" ({})", found.join("; ")) };
        Err(Error::unsupported(format!(
            "the compiler of CUDA kernels (libnvrtc of CUDA {major}.{minor} or newer) is not there{found}"
        ))
        .with_hint(format!(
            "install it (`pip install nvidia-cuda-nvrtc-cu12`, or the package cuda-nvrtc-12-9 of NVIDIA's \
             repository) and name its folder in {FOLDER_VARIABLE} if it is not found, or use --device cpu"
        )))
    }

    fn open(path: &Path) -> Result<Self, libloading::Error> {
        // The compiler loads this library by name, which succeeds once it is loaded.
        if let Some(helper) = helper(path) {
            // SAFETY: its initialisers have no requirements.
            std::mem::forget(unsafe { Library::new(helper)? });
        }
        // SAFETY: as above.
        let library = unsafe { Library::new(path)? };
        let functions = Functions::of(&library)?;
        // The library must not be unloaded, since its functions are in use.
        std::mem::forget(library);
        let mut version = (0, 0);
        let mut num_architectures = 0;
        // SAFETY: each pointer is to a variable of its type, and the list has the length that the library requested.
        let architectures = unsafe {
            (functions.version)(&raw mut version.0, &raw mut version.1);
            (functions.num_architectures)(&raw mut num_architectures);
            let mut architectures = vec![0; usize::try_from(num_architectures).unwrap_or(0)];
            (functions.architectures)(architectures.as_mut_ptr());
            architectures.sort_unstable();
            architectures
        };
        Ok(Self { functions, version, architectures })
    }

    /// The target for a GPU of this architecture, such as 90.
    pub(super) fn target(&self, architecture: c_int) -> Target {
        let known = self.architectures.iter().rev().find(|known| **known <= architecture);
        match known {
            Some(&known) if known == architecture => Target::Gpu(known),
            Some(&known) => Target::From(known),
            None => Target::Gpu(architecture),
        }
    }

    /// Compiles a program that includes `headers`, pairs of a name and a text. May run on several threads.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Internal`] with the compiler's messages.
    pub(super) fn compile(
        &self,
        name: &str,
        text: &str,
        headers: &[(&str, &str)],
        target: Target,
        options: &[&str],
    ) -> Result<Compiled> {
        let failed = |what: &str| Error::internal(format!("{name}: {what}"));
        let string = |text: &str| CString::new(text).map_err(|error| failed(&error.to_string()));
        let (names, texts): (Vec<_>, Vec<_>) = headers.iter().copied().unzip();
        let names = names.into_iter().map(string).collect::<Result<Vec<_>>>()?;
        let texts = texts.into_iter().map(string).collect::<Result<Vec<_>>>()?;
        let target_option = target.option();
        let options = options.iter().copied().chain([&*target_option]);
        let options = options.map(string).collect::<Result<Vec<_>>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (source, file) = (string(text)?, string(name)?);
        let (name_list, text_list, option_list) = (pointers(&names), pointers(&texts), pointers(&options));
        let mut program = Program { functions: &self.functions, handle: null_mut() };
        // SAFETY: all strings end with a zero and live until the program is dropped; the lists have the given lengths.
        let created = unsafe {
            (self.functions.create)(
                &raw mut program.handle,
                source.as_ptr(),
                file.as_ptr(),
                name_list.len() as c_int,
                text_list.as_ptr(),
                name_list.as_ptr(),
            )
        };
        if created != 0 {
            return Err(failed(&format!("the compiler takes no program (error {created})")));
        }
        // SAFETY: as above.
        let result = unsafe {
            (self.functions.compile)(program.handle, option_list.len() as c_int, option_list.as_ptr())
        };
        let log = program.bytes(self.functions.log_len, self.functions.log);
        let messages = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy().into_owned();
        if result != 0 {
            return Err(failed(&format!("it does not compile (error {result}):\n{messages}")));
        }
        let image = match target {
            Target::Gpu(_) => program.bytes(self.functions.cubin_len, self.functions.cubin),
            Target::From(_) => program.bytes(self.functions.ptx_len, self.functions.ptx),
        };
        if image.is_empty() {
            return Err(failed("the compiler made nothing of it"));
        }
        Ok(Compiled { image, messages })
    }
}

struct Program<'a> {
    functions: &'a Functions,
    handle: Handle,
}

impl Program<'_> {
    /// The output of a pair of functions: the length, and that many bytes.
    fn bytes(
        &self,
        len: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        bytes: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Vec<u8> {
        let mut num_bytes = 0;
        // SAFETY: the program exists, and the length is written to a variable.
        if unsafe { len(self.handle, &raw mut num_bytes) } != 0 {
            return Vec::new();
        }
        let mut all = vec![0_u8; num_bytes];
        // SAFETY: the buffer has the reported length.
        if unsafe { bytes(self.handle, all.as_mut_ptr().cast()) } != 0 {
            return Vec::new();
        }
        all
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created, and is not used afterwards.
        unsafe { (self.functions.destroy)(&raw mut self.handle) };
    }
}

/// Names of the library, the newest first.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Candidates for the library's path, in order: only the folder of the variable if it is set; otherwise the system's
/// search, the toolkit's folders, and those of Python packages.
fn candidates() -> Vec<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let in_folder =
        |folder: &Path| NAMES.map(|name| folder.join(name)).into_iter().filter(|path| path.is_file());
    if let Some(folder) = variable(FOLDER_VARIABLE) {
        return in_folder(&folder).collect();
    }
    let mut folders = Vec::new();
    for toolkit in ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable) {
        folders.push(toolkit.join("lib64"));
    }
    folders
        .extend(["/usr/local/cuda/lib64", "/opt/cuda/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
    let homes = env::home_dir().map(|home| home.join(".local"));
    let roots = environments.chain(homes).chain(["/usr/local", "/usr"].map(PathBuf::from));
    for root in roots {
        for python in entries(&root.join("lib")).into_iter().filter(|path| is_python(path)) {
            for packages in ["site-packages", "dist-packages"] {
                let packages = python.join(packages).join("nvidia");
                folders.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|folder| packages.join(folder)));
            }
        }
    }
    let mut all: Vec<PathBuf> = NAMES.map(PathBuf::from).into_iter().collect();
    all.extend(folders.iter().flat_map(|folder| in_folder(folder)));
    all
}

fn is_python(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
}

/// The entries of a folder in the order of names, if it is readable.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

/// The library of built-in functions next to the compiler.
fn helper(path: &Path) -> Option<PathBuf> {
    let folder = path.parent().filter(|folder| folder.is_absolute())?;
    entries(folder).into_iter().find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libnvrtc-builtins.so.")
    })
}
