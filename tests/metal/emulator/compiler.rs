//! From a kernel source to a shared object, by way of clang, once for each content.
//!
//! Objects lie in cargo's folder for the temporary files of tests, in a folder named after everything that
//! goes into them. A folder appears there whole or not at all, so processes need not know of each other.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use tinyvllm::ops::gpu::Library;
use xxhash_rust::xxh3::Xxh3;

use super::object::Object;
use super::rewriter::{FunctionConstant, Mode, Rewritten, rewrite};

/// How a library is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    /// As fast as this machine runs it.
    Fast,
    /// With the freedom that Apple's compiler takes by default.
    FastMath,
    /// Every access is checked: bounds, races, declarations, values.
    Checked,
    /// With the address and undefined-behaviour sanitizers, whose run time has to be in the process already.
    Sanitized,
}

impl Variant {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Fast => &["-O2", "-ffp-contract=off"],
            Self::FastMath => &["-O2", "-ffast-math", "-ffp-contract=fast"],
            Self::Checked => &[
                "-O1",
                "-ffp-contract=off",
                "-fsanitize=thread",
                "-mllvm",
                "-tsan-instrument-func-entry-exit=0",
                "-mllvm",
                "-tsan-instrument-read-before-write=1",
            ],
            Self::Sanitized => &[
                "-O1",
                "-ffp-contract=off",
                "-fsanitize=address,undefined",
                "-fno-sanitize=vptr,function",
                "-fno-sanitize-recover=all",
            ],
        }
    }

    fn run_time_flags(self) -> &'static [&'static str] {
        match self {
            Self::Fast | Self::FastMath => &[],
            Self::Checked => &["-DMSL_CHECKED"],
            Self::Sanitized => &["-DMSL_ASAN"],
        }
    }

    fn link_flags(self) -> &'static [&'static str] {
        match self {
            // The functions that the thread sanitizer's code calls are in the run time.
            Self::Fast | Self::FastMath | Self::Checked => &[],
            Self::Sanitized => &["-fsanitize=address,undefined", "-shared-libasan"],
        }
    }
}

/// clang of a version that knows everything that is asked of it.
#[derive(Debug)]
pub(crate) struct Compiler {
    program: &'static str,
    version: String,
}

/// What the kernels' language is a dialect of.
const LANGUAGE: &str = "-std=c++14";

/// C++ for this machine.
const RUN_FLAGS: [&str; 11] = [
    "-x",
    "c++",
    LANGUAGE,
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-nostdinc",
];

/// What is an error when a library is checked. Where signs are converted the bits stay, and kernels do so wherever they
/// count with an `int`. The lines of another style are the preprocessor's.
const WARNINGS: [&str; 8] = [
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Wshadow",
    "-Wno-sign-conversion",
    "-Wno-gnu-line-marker",
    "-Werror",
];

/// OpenCL C++, for the check of address spaces. It is C++17; so that the shim may be, the other check has C++14.
const ADDRESS_SPACE_FLAGS: [&str; 5] =
    ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "--target=x86_64-linux-gnu"];

/// CUDA without its headers, whose work the shim does.
const CUDA_FLAGS: [&str; 10] = [
    "-x",
    "cuda",
    "--cuda-device-only",
    "--cuda-gpu-arch=sm_90",
    "-nocudainc",
    "-nocudalib",
    "--cuda-feature=+ptx81",
    "-std=gnu++17",
    "-DMSL_CUDA",
    "-nostdinc",
];

const ASSEMBLER_FLAGS: [&str; 2] = ["-arch=sm_90", "-v"];

/// As many as a thread of an Apple GPU can have: what spills here may spill there.
pub(crate) const MAX_REGISTERS: usize = 128;
/// Registers with which many more simdgroups are in flight, and bytes that a kernel may spill to get along with them: next
/// to nothing.
const FEW_REGISTERS: [(usize, usize); 2] = [(72, 0), (80, 16)];

/// A library for one set of values of its function constants.
#[derive(Debug)]
pub(crate) struct CudaModule {
    /// What the driver loads.
    pub(crate) image: Vec<u8>,
    /// What the assembler says of each kernel.
    pub(crate) messages: String,
}

/// The oldest that is known to compile the shim in all modes.
const MIN_VERSION: u32 = 19;

static COMPILER: LazyLock<Option<Compiler>> = LazyLock::new(|| {
    let names = ["clang++-19", "clang++", "clang++-20", "clang++-21", "clang++-22"];
    names.into_iter().find_map(|program| {
        let output = Command::new(program).arg("--version").output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        let (_, number) = version.split_once("clang version ")?;
        let major: u32 = number.split('.').next()?.parse().ok()?;
        (major >= MIN_VERSION).then_some(Compiler { program, version })
    })
});

type Slot = Arc<OnceLock<Result<Arc<Object>, String>>>;
static OBJECTS: LazyLock<Mutex<HashMap<(Variant, u128), Slot>>> = LazyLock::new(Mutex::default);

impl Compiler {
    /// The compiler of this machine, if there is one.
    pub(crate) fn find() -> Option<&'static Self> {
        COMPILER.as_ref()
    }

    /// The object of a library; compiled if no process has done so before.
    ///
    /// # Errors
    /// The compiler's messages.
    pub(crate) fn object(&self, text: &str, variant: Variant) -> Result<Arc<Object>, String> {
        let key = (variant, xxhash_rust::xxh3::xxh3_128(text.as_bytes()));
        let slot = {
            let mut objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(objects.entry(key).or_default())
        };
        slot.get_or_init(|| self.load(text, variant).map(Arc::new)).clone()
    }

    /// Whether the language accepts a library, as far as clang knows: as C++14 without warnings, and as OpenCL C++, whose
    /// address spaces and vectors are those of the language.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check_language(&self, text: &str) -> Result<(), String> {
        let check = |name, mode, flags: &[&str]| {
            let rewritten = self.rewrite(text, mode)?;
            let flags = [flags, &WARNINGS, &["-nostdinc", "-fsyntax-only"]].concat();
            self.syntax(name, &rewritten.text, &flags)
        };
        let results = [
            check("strict", Mode::Run, &RUN_FLAGS),
            check("address-spaces", Mode::AddressSpaces, &ADDRESS_SPACE_FLAGS),
        ];
        let messages: Vec<String> = results.into_iter().filter_map(Result::err).collect();
        if messages.is_empty() { Ok(()) } else { Err(messages.join("\n")) }
    }

    /// Whether the library compiles for CUDA.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check_cuda(&self, text: &str) -> Result<String, String> {
        let rewritten = self.rewrite(text, Mode::Cuda)?;
        let mut flags = CUDA_FLAGS.map(str::to_owned).to_vec();
        flags.push("-fsyntax-only".to_owned());
        flags
            .extend(rewritten.constants.iter().map(|constant| format!("-DMSL_VALUE_OF_{}=1", constant.name)));
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        self.syntax("cuda", &rewritten.text, &flags)?;
        Ok(rewritten.text)
    }

    /// The library for a GPU that runs CUDA, with each set of values of those of its function constants that are flags
    /// and that a launch may have: constant `i` is bit `i` of a set. Numbers are set in the loaded module.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn compile_cuda(&self, text: &str, toolkit: &Path) -> Result<Vec<(u32, CudaModule)>, String> {
        let rewritten = self.rewrite(text, Mode::Cuda)?;
        let module = |set: u32| {
            let flags = cuda_flags(&rewritten, set, Unrolling::Everything);
            self.cuda_module(&rewritten.text, &flags, toolkit).map(|module| (set, module))
        };
        // Two at a time, since most of them wait for one library with many kernels.
        let num_flags = rewritten.constants.iter().filter(|constant| constant.is_flag()).count();
        let sets: Vec<u32> = flag_sets(num_flags).collect();
        let mut modules = Vec::new();
        for pair in sets.chunks(2) {
            let pair: Vec<_> = std::thread::scope(|scope| {
                let module = &module;
                let threads: Vec<_> = pair.iter().map(|set| scope.spawn(move || module(*set))).collect();
                threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
            });
            modules.extend(pair.into_iter().collect::<Result<Vec<_>, _>>()?);
        }
        Ok(modules)
    }

    fn cuda_module(&self, text: &str, flags: &[String], toolkit: &Path) -> Result<CudaModule, String> {
        let mut hash = self.hash(text)?;
        hash.update(flags.join(" ").as_bytes());
        hash.update(format!("{ASSEMBLER_FLAGS:?} {MAX_REGISTERS} {FEW_REGISTERS:?}").as_bytes());
        hash.update(toolkit.as_os_str().as_encoded_bytes());
        let folder = in_cache(&format!("cuda-{:032x}", hash.digest128()), |folder| {
            let assembly = self.cuda_assembly(text, flags, toolkit, folder)?;
            let module = folder.join("kernels.cubin");
            let assemble = |flags: &[String]| {
                let mut assemble = Command::new(toolkit.join("bin/ptxas"));
                let flags = ASSEMBLER_FLAGS.iter().copied().chain(flags.iter().map(String::as_str));
                run(assemble.args(flags).arg(&assembly).arg("-o").arg(&module))
            };
            let freely = assemble(&[])?;
            let mut with_few = Vec::with_capacity(FEW_REGISTERS.len());
            for (registers, _) in FEW_REGISTERS {
                with_few.push(usage_of_kernels(&assemble(&[format!("-maxrregcount={registers}")])?));
            }
            let text = fs::read_to_string(&assembly).map_err(|error| error.to_string())?;
            let text = with_fewer_registers(&text, &usage_of_kernels(&freely), &with_few);
            fs::write(&assembly, text).map_err(|error| error.to_string())?;
            let messages = assemble(&[])?;
            fs::write(folder.join("messages.txt"), messages).map_err(|error| error.to_string())
        })?;
        let read = |name| fs::read(folder.join(name)).map_err(|error| format!("{name}: {error}"));
        let messages = String::from_utf8_lossy(&read("messages.txt")?).into_owned();
        Ok(CudaModule { image: read("kernels.cubin")?, messages })
    }

    fn cuda_assembly(
        &self,
        text: &str,
        flags: &[String],
        toolkit: &Path,
        folder: &Path,
    ) -> Result<PathBuf, String> {
        let (source, assembly) = (folder.join("kernels.cu"), folder.join("kernels.ptx"));
        fs::write(&source, text).map_err(|error| error.to_string())?;
        let mut compile = self.command();
        compile.args(flags).args(["-Xclang", "-mlink-builtin-bitcode", "-Xclang"]);
        compile.arg(toolkit.join("nvvm/libdevice/libdevice.10.bc")).arg("-isystem").arg(shim());
        run(compile.arg(&source).arg("-o").arg(&assembly))?;
        Ok(assembly)
    }

    /// What the kernels that are wanted take on a GPU that runs CUDA, without any limit, for one set of function
    /// constants as in [`Self::compile_cuda`].
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn cuda_usage(
        &self,
        text: &str,
        toolkit: &Path,
        set: u32,
        unrolling: Unrolling,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<BTreeMap<String, KernelUsage>, String> {
        let rewritten = self.rewrite(text, Mode::Cuda)?;
        // What is not entered is not compiled.
        let is_left = |line: &&str| {
            let entry = line.strip_prefix("MSL_CUDA_ENTRY(");
            entry.and_then(|entry| entry.split(',').next()).is_none_or(&is_wanted)
        };
        let lines: Vec<&str> = rewritten.text.lines().filter(is_left).collect();
        let (text, flags) = (lines.join("\n"), cuda_flags(&rewritten, set, unrolling));
        let mut hash = self.hash(&text)?;
        hash.update(flags.join(" ").as_bytes());
        let assembler = toolkit.join("bin/ptxas");
        let version = Command::new(&assembler).arg("--version").output();
        hash.update(&version.map_err(|error| format!("{}: {error}", assembler.display()))?.stdout);
        let folder = in_cache(&format!("usage-{:032x}", hash.digest128()), |folder| {
            let assembly = self.cuda_assembly(&text, &flags, toolkit, folder)?;
            let mut assemble = Command::new(&assembler);
            let messages = run(assemble.args(ASSEMBLER_FLAGS).arg(assembly).args(["-o", "/dev/null"]))?;
            fs::write(folder.join("messages.txt"), messages).map_err(|error| error.to_string())
        })?;
        let messages = fs::read_to_string(folder.join("messages.txt")).map_err(|error| error.to_string())?;
        Ok(usage_of_kernels(&messages))
    }

    /// Only compiles, and remembers by an empty folder that it did.
    fn syntax(&self, name: &str, text: &str, flags: &[&str]) -> Result<(), String> {
        let mut hash = self.hash(text)?;
        hash.update(flags.join(" ").as_bytes());
        in_cache(&format!("{name}-{:032x}", hash.digest128()), |folder| {
            let source = folder.join("kernels.cpp");
            fs::write(&source, text).map_err(|error| error.to_string())?;
            run(self.command().args(flags).arg("-isystem").arg(shim()).arg(&source)).map(drop)
        })
        .map(drop)
    }

    /// The library of the sanitizers, if it is installed.
    pub(super) fn sanitizer(&self) -> Option<PathBuf> {
        let output = self.command().arg("-print-file-name=libclang_rt.asan-x86_64.so").output().ok()?;
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        (path.is_absolute() && path.is_file()).then_some(path)
    }

    fn load(&self, text: &str, variant: Variant) -> Result<Object, String> {
        let rewritten = self.rewrite(text, Mode::Run)?;
        let run_time = self.run_time(variant)?;
        let mut flags = RUN_FLAGS.to_vec();
        flags.extend(["-fPIC", "-gline-tables-only", machine()]);
        flags.extend(variant.flags());
        let mut hash = self.hash(&rewritten.text)?;
        hash.update(flags.join(" ").as_bytes());
        hash.update(run_time.as_os_str().as_encoded_bytes());
        let folder = in_cache(&format!("kernels-{:032x}", hash.digest128()), |folder| {
            let (source, object) = (folder.join("kernels.cpp"), folder.join("kernels.o"));
            fs::write(&source, &rewritten.text).map_err(|error| error.to_string())?;
            let mut compile = self.command();
            run(compile
                .args(&flags)
                .arg("-isystem")
                .arg(shim())
                .arg("-c")
                .arg(&source)
                .arg("-o")
                .arg(&object))?;
            let mut link = self.command();
            link.arg("-shared").args(variant.link_flags()).arg(&object).arg(run_time.join("run_time.o"));
            run(link.arg("-o").arg(folder.join("kernels.so")).arg("-lm"))?;
            fs::remove_file(object).map_err(|error| error.to_string())
        })?;
        Object::load(&folder.join("kernels.so"), rewritten.barriers)
    }

    fn run_time(&self, variant: Variant) -> Result<PathBuf, String> {
        let mut flags = vec!["-std=c++20", "-O2", "-fPIC"];
        flags.extend(variant.run_time_flags());
        let mut hash = self.hash("")?;
        hash.update(flags.join(" ").as_bytes());
        in_cache(&format!("run-time-{:032x}", hash.digest128()), |folder| {
            let source = here().join("runtime/runtime.cpp");
            run(self.command().args(&flags).arg("-c").arg(source).arg("-o").arg(folder.join("run_time.o")))
                .map(drop)
        })
    }

    fn rewrite(&self, text: &str, mode: Mode) -> Result<Rewritten, String> {
        // The library's headers are the shim's; what is left for the preprocessor are macros and conditions.
        let text: String = text
            .lines()
            .map(|line| {
                if line.trim_start().starts_with("#include <metal_") {
                    "\n".to_owned()
                } else {
                    format!("{line}\n")
                }
            })
            .collect();
        let mut command = self.command();
        command.args(["-E", "-x", "c++", "-nostdinc", "-undef", "-D__METAL__"]);
        let (major, minor) = Library::LANGUAGE_VERSION;
        command.arg(format!("-D__METAL_VERSION__={major}{minor}0")).arg("-");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        // The preprocessor reads everything before it writes more than a pipe holds only if it is small; so
        // another thread writes.
        let input = child.stdin.take();
        let writer = std::thread::spawn(move || input.map(|mut input| input.write_all(text.as_bytes())));
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        drop(writer.join());
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        rewrite(&String::from_utf8_lossy(&output.stdout), mode)
    }

    fn command(&self) -> Command {
        Command::new(self.program)
    }

    /// Of the compiler, the shim, the run time and `text`.
    fn hash(&self, text: &str) -> Result<Xxh3, String> {
        let mut hash = Xxh3::new();
        hash.update(self.version.as_bytes());
        hash.update(text.as_bytes());
        for folder in [shim(), here().join("runtime")] {
            let entries = fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
            let mut files: Vec<PathBuf> =
                entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
            files.sort();
            for file in files {
                hash.update(&fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?);
            }
        }
        Ok(hash)
    }
}

/// How eagerly loops are unrolled. Apple's compiler keeps no array in memory that it can keep in registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unrolling {
    /// As eagerly as an array in registers may need.
    Everything,
    /// As clang does by default, and where the source demands it.
    AsWritten,
}

/// The sets of values of so many flags that launches have: bit `i` is constant `i`. Products with the fourth, of groups,
/// have no bias and are added to nothing; those with the fifth, in half precision, have nothing else.
pub(crate) fn flag_sets(num_flags: usize) -> impl Iterator<Item = u32> {
    let is_launched = |set: &u32| match set >> 3 {
        0 => true,
        1 => set & 0b0110 == 0,
        _ => *set == 0b1_0000,
    };
    (0..1 << num_flags).filter(is_launched)
}

/// For one set of values of function constants, which are all flags: constant `i` is bit `i`.
fn cuda_flags(rewritten: &Rewritten, set: u32, unrolling: Unrolling) -> Vec<String> {
    let mut flags = CUDA_FLAGS.to_vec();
    flags.extend(["-O3", "-S", "-ffp-contract=fast", "-mllvm", "-inline-threshold=1000000"]);
    if unrolling == Unrolling::Everything {
        flags.extend(["-mllvm", "-unroll-threshold=3000"]);
    }
    if rewritten.text.contains("simdgroup_matrix") {
        flags.push("-DMSL_MATRICES");
    }
    let value = |constant: &FunctionConstant| {
        format!("-DMSL_VALUE_OF_{}={}", constant.name, set >> constant.index & 1)
    };
    let values = rewritten.constants.iter().filter(|constant| constant.is_flag()).map(value);
    flags.into_iter().map(str::to_owned).chain(values).collect()
}

/// What a thread of a kernel takes: registers, and bytes that it spills and keeps on its stack; and bytes of
/// threadgroup memory that the kernel declares itself.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KernelUsage {
    pub(crate) registers: usize,
    pub(crate) spills: usize,
    pub(crate) stack: usize,
    pub(crate) fixed: usize,
}

/// Reads the assembler's messages.
pub(crate) fn usage_of_kernels(messages: &str) -> BTreeMap<String, KernelUsage> {
    let mut all = BTreeMap::new();
    let (mut kernel, mut usage) = (None, KernelUsage::default());
    for line in messages.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function 'msl_") {
            kernel = rest.split('\'').next();
        } else if line.contains("bytes stack frame") {
            let numbers: Vec<usize> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            if let [frame, stores, loads] = numbers[..] {
                (usage.stack, usage.spills) = (frame, stores + loads);
            }
        } else if let Some((_, rest)) = line.split_once("Used ")
            && let Some(kernel) = kernel.take()
        {
            let before = |what: &str| -> usize {
                let end = rest.find(what).unwrap_or(0);
                rest[..end].split_whitespace().next_back().and_then(|word| word.parse().ok()).unwrap_or(0)
            };
            (usage.registers, usage.fixed) = (before(" registers"), before(" bytes smem"));
            all.insert(kernel.to_owned(), std::mem::take(&mut usage));
        }
    }
    all
}

/// Limits the kernels that took more than a thread of an Apple GPU has, and those that get along with few, because
/// simdgroups in flight hide what a wait for memory takes. The assembler also plans better for a limit that it knows
/// of. The others keep what it found best.
fn with_fewer_registers(
    assembly: &str,
    freely: &BTreeMap<String, KernelUsage>,
    with_few: &[BTreeMap<String, KernelUsage>],
) -> String {
    let limit_of = |name: &str| {
        let taken = freely.get(name)?.registers;
        let is_enough = |((registers, spills), usage): ((usize, usize), &BTreeMap<String, KernelUsage>)| {
            (taken > registers - 8 && usage.get(name)?.spills <= spills).then_some(registers)
        };
        let few = FEW_REGISTERS.into_iter().zip(with_few).find_map(is_enough);
        few.or_else(|| (taken >= MAX_REGISTERS).then_some(MAX_REGISTERS))
    };
    let mut text = String::with_capacity(assembly.len());
    let mut limit = None;
    for line in assembly.lines() {
        if let Some((_, rest)) = line.split_once(".entry ") {
            limit = rest.split('(').next().and_then(|name| limit_of(name.strip_prefix("msl_")?));
        } else if line == "{"
            && let Some(limit) = limit.take()
        {
            _ = writeln!(text, ".maxnreg {limit}");
        }
        text.push_str(line);
        text.push('\n');
    }
    text
}

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metal/emulator")
}

fn shim() -> PathBuf {
    here().join("shim")
}

/// With conversions of half precision in the processor where it has them.
fn machine() -> &'static str {
    let is_v3 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("fma");
    if is_v3 { "-march=x86-64-v3" } else { "-march=x86-64" }
}

fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{}: {error}", command.get_program().display()))?;
    let messages = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(messages) } else { Err(messages) }
}

/// The folder with this name; if there is none, `make` fills one, which gets the name when it is complete.
fn in_cache(name: &str, make: impl FnOnce(&Path) -> Result<(), String>) -> Result<PathBuf, String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("metal-emulator");
    let folder = cache.join(name);
    if folder.is_dir() {
        return Ok(folder);
    }
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let unfinished = cache.join(format!("unfinished-{}-{number}", std::process::id()));
    fs::create_dir_all(&unfinished).map_err(|error| format!("{}: {error}", unfinished.display()))?;
    let made = make(&unfinished);
    // If another process was faster, its folder is as good.
    let renamed = made.is_ok() && fs::rename(&unfinished, &folder).is_ok();
    if !renamed {
        drop(fs::remove_dir_all(&unfinished));
    }
    made?;
    if folder.is_dir() { Ok(folder) } else { Err(format!("cannot make {}", folder.display())) }
}
