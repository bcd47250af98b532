//! The kernels in the eyes of Apple's compiler, where there is one: it comes with Xcode, and compiles for any GPU.
//!
//! With the variable `TINYVLLM_REQUIRE_METAL_COMPILER` it has to be there.
#![cfg(target_os = "macos")]
#![expect(clippy::unwrap_used, reason = "in tests a failure to prepare is a failure")]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use tinyvllm::ops::gpu::{LIBRARIES, Library};

fn compiler() -> Command {
    let mut command = Command::new("xcrun");
    command.args(["-sdk", "macosx", "metal"]);
    command
}

/// Compiles a text as pipelines are compiled; gives what the compiler says if there is anything.
fn compile(name: &str, text: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("metal");
    fs::create_dir_all(&folder).unwrap();
    let (source, object) = (folder.join(format!("{name}.metal")), folder.join(format!("{name}.air")));
    fs::write(&source, text).unwrap();
    let (major, minor) = Library::LANGUAGE_VERSION;
    let mut command = compiler();
    command.arg(format!("-std=metal{major}.{minor}")).args(["-Wall", "-Werror", "-c"]);
    let output = command.arg(source).arg("-o").arg(object).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() && said.trim().is_empty() { Ok(()) } else { Err(said) }
}

#[test]
fn every_library_compiles_without_a_warning() {
    let found = compiler().arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        let message = "`xcrun -sdk macosx metal` does not run: the kernels are not compiled by Apple's compiler; \
                       Xcode has it, newer ones after `xcodebuild -downloadComponent MetalToolchain`";
        assert!(env::var_os("TINYVLLM_REQUIRE_METAL_COMPILER").is_none(), "{message}");
        eprintln!("skipped: {message}");
        return;
    }
    let texts = LIBRARIES
        .iter()
        .flat_map(|library| [library.text(), library.text_of(None)].map(|text| (library, text)));
    let said: Vec<String> = texts.filter_map(|(library, text)| compile(library.name, &text).err()).collect();
    assert!(said.is_empty(), "{}", said.join("\n"));
    // That it is this compiler, with these rules.
    let text =
        "kernel void k(uint3 g [[threadgroup_position_in_grid]], uint n [[threads_per_threadgroup]]) {}";
    let said = compile("positions_of_two_lengths", text).unwrap_err();
    assert!(said.contains("all scalar types or all vector types"), "{said}");
    let said = compile("unused", "kernel void k(device int *x [[buffer(0)]]) { int y = x[0]; }").unwrap_err();
    assert!(said.contains("unused variable"), "{said}");
}
