//! From a kernel source to a shared object, by way of clang, once for each content.
//!
//! Objects are in cargo's folder for the temporary files of tests, in a folder named after all of their inputs. A
//! folder appears there atomically, so processes need no other coordination.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use tinyvllm::ops::gpu::Library;
use xxhash_rust::xxh3::Xxh3;

use super::object::Object;
use super::rewriter::{Mode, Rewritten, rewrite};

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

/// A version of clang that supports every option in use.
#[derive(Debug)]
pub(crate) struct Compiler {
    program: &'static str,
    version: String,
}

/// The base language of the kernels' dialect.
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

/// Warnings that are errors when a library is checked. Conversions of signs keep the bits, and kernels use them
/// wherever they count with an `int`. The preprocessor emits line markers of another style.
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

/// To optimise without an object, for what only the optimiser finds: a loop that it cannot unroll as its pragma says.
const UNROLL_FLAGS: [&str; 8] =
    ["-O2", "-Wpass-failed", "-Werror=pass-failed", "-nostdinc", "-emit-llvm", "-S", "-o", "/dev/null"];

/// The oldest version known to compile the shim in all modes.
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

    /// Whether the language accepts a library, as far as clang can check: as C++14 without warnings, as OpenCL C++,
    /// whose address spaces and vectors are those of the language, and with every loop unrolled that is to be.
    ///
    /// # Errors
    /// The compiler's messages.
    pub(crate) fn check_language(&self, text: &str) -> Result<(), String> {
        let check = |name, mode, flags: &[&str]| {
            let rewritten = self.rewrite(text, mode)?;
            let flags = [flags, &WARNINGS, &["-nostdinc", "-fsyntax-only"]].concat();
            self.syntax(name, &rewritten.text, &flags)
        };
        let results = [
            check("strict", Mode::Run, &RUN_FLAGS),
            check("address-spaces", Mode::AddressSpaces, &ADDRESS_SPACE_FLAGS),
            self.rewrite(text, Mode::Unrolled).and_then(|unrolled| {
                self.syntax("unrolled", &unrolled.text, &[&RUN_FLAGS[..], &UNROLL_FLAGS].concat())
            }),
        ];
        let messages: Vec<String> = results.into_iter().filter_map(Result::err).collect();
        if messages.is_empty() { Ok(()) } else { Err(messages.join("\n")) }
    }

    /// Only compiles, and remembers by an empty folder that it did.
    fn syntax(&self, name: &str, text: &str, flags: &[&str]) -> Result<(), String> {
        let mut hash = self.hash(text)?;
        hash.update(flags.join(" ").as_bytes());
        in_cache(&format!("{name}-{:032x}", hash.digest128()), |folder| {
            let source = folder.join("kernels.cpp");
            fs::write(&source, text).map_err(|error| error.to_string())?;
            run(self.command().args(flags).args(include_flags()).arg(&source)).map(drop)
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
            compile.args(&flags).args(include_flags()).arg("-c").arg(&source);
            run(compile.arg("-o").arg(&object))?;
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
            let mut compile = self.command();
            compile.args(&flags).args(include_flags()).arg("-c").arg(source);
            run(compile.arg("-o").arg(folder.join("run_time.o"))).map(drop)
        })
    }

    fn rewrite(&self, text: &str, mode: Mode) -> Result<Rewritten, String> {
        // Kernels for NVIDIA's GPUs use only standard C++.
        // What has planted defects is no source to judge.
        let is_metal = !text.contains("#define FOR_NVIDIA") && !text.contains("is_planted(");
        rewrite(&self.preprocess(text)?, mode, is_metal)
    }

    /// The text that is left of a library by the preprocessor.
    ///
    /// # Errors
    /// Its messages.
    pub(crate) fn preprocess(&self, text: &str) -> Result<String, String> {
        // The library's headers are the shim's; for the preprocessor remain macros and conditions.
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
        let said = if output.status.success() { &output.stdout } else { &output.stderr };
        let said = String::from_utf8_lossy(said).into_owned();
        if output.status.success() { Ok(said) } else { Err(said) }
    }

    fn command(&self) -> Command {
        Command::new(self.program)
    }

    /// Of the compiler, the shim, the run time and `text`.
    fn hash(&self, text: &str) -> Result<Xxh3, String> {
        let mut hash = Xxh3::new();
        hash.update(self.version.as_bytes());
        hash.update(text.as_bytes());
        for folder in header_folders().into_iter().chain([here().join("runtime")]) {
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

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/metal/emulator")
}

/// Where the headers are: those of the emulator, and those that NVIDIA GPUs have as well.
fn header_folders() -> [PathBuf; 2] {
    [here().join("shim"), Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops/gpu/device/msl")]
}

fn include_flags() -> impl Iterator<Item = PathBuf> {
    header_folders().into_iter().flat_map(|folder| [PathBuf::from("-isystem"), folder])
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
