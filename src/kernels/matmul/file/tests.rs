use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use proptest::prelude::*;
use tempfile::TempDir;

use super::{MatrixFile, PAGE};
use crate::DType;
use crate::matmul::PackedMatrix;
use crate::pool::ThreadPool;
use crate::simd::CpuLevel;
use crate::{Error, ErrorKind};

/// A type, rows, columns and the bytes of a file.
type Stored = (DType, usize, usize, Vec<u8>);

/// Bytes that differ, with arbitrary meaning in this type.
fn matrix(dtype: DType, rows: usize, cols: usize, seed: u8) -> Stored {
    let len = dtype.row_bytes(cols).unwrap() * rows;
    let bytes = (0..len).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    (dtype, rows, cols, bytes)
}

/// Two of different sizes, so that the second one is packed where the first one was, and of odd shapes.
fn some() -> Vec<Stored> {
    vec![
        matrix(DType::Q4_0, 37, 320, 1),
        matrix(DType::BF16, 17, 5, 2),
        matrix(DType::Q6K, 64, 512, 3),
        matrix(DType::F32, 1, 1, 4),
    ]
}

fn in_memory((dtype, rows, cols, bytes): &Stored) -> PackedMatrix {
    PackedMatrix::pack(*dtype, bytes, *rows, *cols, &ThreadPool::new(2), CpuLevel::Portable).unwrap()
}

/// Loads all matrices, packing missing ones. Returns whether any were packed.
fn load(
    path: &std::path::Path,
    fingerprint: u128,
    all: &[Stored],
) -> Result<(Vec<PackedMatrix>, bool), Error> {
    let file = MatrixFile::open(path.to_owned(), fingerprint, 1)?;
    let pool = ThreadPool::new(2);
    let mut has_packed = false;
    let mut matrices = Vec::new();
    for (dtype, rows, cols, bytes) in all {
        matrices.push(match file.next(*dtype, *rows, *cols)? {
            Some(matrix) => matrix,
            None => {
                has_packed = true;
                file.add(*dtype, bytes, *rows, *cols, &pool)?
            }
        });
    }
    file.finish()?;
    Ok((matrices, has_packed))
}

fn check(path: &std::path::Path, fingerprint: u128, all: &[Stored], packs: bool) {
    let (matrices, has_packed) = load(path, fingerprint, all).unwrap();
    assert_eq!(has_packed, packs);
    for (matrix, stored) in matrices.iter().zip(all) {
        assert!(matrix.is_in_file());
        matrix.check().unwrap();
        assert_eq!(matrix.tiles.as_slice(), in_memory(stored).tiles.as_slice(), "{matrix:?}");
        matrix.fetch();
    }
}

fn file_in_folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deeper").join("model.experts");
    (folder, path)
}

fn names(path: &std::path::Path) -> Vec<String> {
    let entries = fs::read_dir(path.parent().unwrap()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn the_second_start_finds_what_the_first_one_made() {
    let (_folder, path) = file_in_folder();
    check(&path, 7, &some(), true);
    let made = fs::metadata(&path).unwrap().modified().unwrap();
    check(&path, 7, &some(), false);
    check(&path, 7, &some(), false);
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), made);
    assert_eq!(names(&path), ["model.experts", "model.experts.lock"]);

    let file = MatrixFile::open(path.clone(), 7, 1).unwrap();
    assert_eq!(file.num_bytes(), fs::metadata(&path).unwrap().len());
    assert_eq!((file.num_bytes() % PAGE, file.path()), (8 * some().len() as u64, &*path));
    // Once it has been read, padding too, all of it is in memory.
    fs::read(&path).unwrap();
    #[cfg(target_os = "linux")]
    assert_eq!(file.resident_bytes(), Some(file.num_bytes()));
}

#[test]
fn a_file_of_something_else_is_made_again() {
    let (_folder, path) = file_in_folder();
    check(&path, 7, &some(), true);
    check(&path, 8, &some()[1..], true);
    check(&path, 8, &some()[1..], false);
    check(&path, 7, &some(), true);
}

#[test]
fn a_damaged_file_is_made_again() {
    let (_folder, path) = file_in_folder();
    check(&path, 7, &some(), true);
    let whole = fs::read(&path).unwrap();
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>);
    let damages: [(&str, Damage<'_>); 7] = [
        ("empty", &|bytes| bytes.clear()),
        ("shorter than a header", &|bytes| bytes.truncate(20)),
        ("short", &|bytes| bytes.truncate(whole.len() - 1)),
        ("long", &|bytes| bytes.push(0)),
        ("with another checksum", &|bytes| bytes[whole.len() - 1] ^= 1),
        ("of another version", &|bytes| bytes[8] ^= 1),
        ("with another number of matrices", &|bytes| bytes[32] ^= 1),
    ];
    for (what, damage) in damages {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let (_, has_packed) = load(&path, 7, &some()).unwrap();
        assert!(has_packed, "a file that is {what}");
        assert_eq!(fs::read(&path).unwrap(), whole, "{what}");
    }
}

/// Each matrix is checked, at its first use.
#[test]
fn a_damaged_matrix_is_named_and_the_others_stay_in_use() {
    let (_folder, path) = file_in_folder();
    check(&path, 7, &some(), true);
    let whole = fs::read(&path).unwrap();
    let (matrices, _) = load(&path, 7, &some()).unwrap();
    let places: Vec<_> = matrices.iter().map(|matrix| matrix.tiles.as_slice().as_ptr().addr()).collect();
    for (damaged, matrix) in matrices.iter().enumerate() {
        for at in [0, matrix.num_bytes() - 1] {
            let mut bytes = whole.clone();
            bytes[PAGE as usize + places[damaged] - places[0] + at] ^= 4;
            fs::write(&path, bytes).unwrap();
            let (matrices, has_packed) = load(&path, 7, &some()).unwrap();
            assert!(!has_packed);
            for (index, matrix) in matrices.iter().enumerate() {
                let result = matrix.check();
                assert_eq!(result.is_err(), index == damaged, "{damaged}: {result:?}");
                let Err(error) = result else { continue };
                assert!(error.message().contains(path.to_str().unwrap()), "{error}");
                assert!(error.message().contains("delete the file"), "{error}");
                assert!(matrix.check().is_err(), "not only the first time");
            }
        }
    }
    assert!(in_memory(&some()[0]).check().is_ok());
}

#[test]
fn a_file_that_is_not_finished_is_none() {
    let (_folder, path) = file_in_folder();
    let (dtype, rows, cols, bytes) = &some()[0];
    let begin = || {
        let file = MatrixFile::open(path.clone(), 7, 1).unwrap();
        file.add(*dtype, bytes, *rows, *cols, &ThreadPool::new(1)).unwrap();
        file
    };
    drop(begin());
    assert_eq!(names(&path), ["model.experts.lock"], "an error while loading leaves nothing");
    // The file of a killed process.
    fs::write(path.with_file_name("model.experts.incomplete"), [1; 100]).unwrap();
    check(&path, 7, &some(), true);
    assert_eq!(names(&path), ["model.experts", "model.experts.lock"]);
}

#[test]
fn two_starts_at_once_make_one_file() {
    let (_folder, path) = file_in_folder();
    let first = MatrixFile::open(path.clone(), 7, 1).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| check(&path, 7, &some(), false));
        let pool = ThreadPool::new(1);
        for (dtype, rows, cols, bytes) in some() {
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(first.next(dtype, rows, cols).unwrap().is_none());
            first.add(dtype, &bytes, rows, cols, &pool).unwrap();
        }
        assert!(!second.is_finished(), "it waits");
        first.finish().unwrap();
        second.join().unwrap();
    });
}

#[test]
fn a_replaced_file_stays_in_use() {
    let (_folder, path) = file_in_folder();
    check(&path, 7, &some(), true);
    let (before, _) = load(&path, 7, &some()).unwrap();
    check(&path, 8, &[matrix(DType::Q8_0, 16, 32, 9)], true);
    for (matrix, stored) in before.iter().zip(&some()) {
        assert_eq!(matrix.tiles.as_slice(), in_memory(stored).tiles.as_slice());
    }
}

#[test]
fn a_full_disk_is_an_error_before_any_write() {
    let (_folder, path) = file_in_folder();
    let error = MatrixFile::open(path.clone(), 7, u64::MAX / 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Capacity);
    let folder = path.parent().unwrap().to_str().unwrap();
    for text in ["9223372036.85 GB", "are free", folder] {
        assert!(error.message().contains(text), "{error}: {text}");
    }
    assert!(error.hint().unwrap().contains("--expert-weights-dir"));
    assert_eq!(names(&path), ["model.experts.lock"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error_with_a_way_out() {
    let (folder, _) = file_in_folder();
    let in_the_way = folder.path().join("file");
    fs::write(&in_the_way, "").unwrap();
    let error = MatrixFile::open(in_the_way.join("model.experts"), 7, 1).unwrap_err();
    assert!(error.message().contains(in_the_way.to_str().unwrap()), "{error}");
    assert!(error.hint().unwrap().contains("--expert-weights-dir"));
}

#[test]
fn other_matrices_than_those_in_the_file_are_an_error() {
    let (_folder, path) = file_in_folder();
    check(&path, 7, &some(), true);
    let mut others = vec![some(), some()[..2].to_vec(), some()];
    others[0].push(matrix(DType::F32, 16, 16, 0));
    others[2].swap(0, 1);
    for all in others {
        let error = load(&path, 7, &all).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel);
        assert!(error.message().contains(path.to_str().unwrap()), "{error}");
        assert!(error.hint().unwrap().contains("delete"));
    }
    let file = MatrixFile::open(path, 7, 1).unwrap();
    let (dtype, rows, cols, bytes) = &some()[0];
    let error = file.add(*dtype, bytes, *rows, *cols, &ThreadPool::new(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Internal);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_matrices_are_the_same_in_a_file(
        shapes in prop::collection::vec((0_usize..4, 1_usize..40, 1_usize..4), 1..6),
    ) {
        let types = [DType::Q8_0, DType::F16, DType::BF16, DType::Q4K];
        let all: Vec<_> = shapes
            .iter()
            .zip(0..)
            .map(|(&(dtype, rows, blocks), seed)| {
                let dtype = types[dtype];
                matrix(dtype, rows, blocks * dtype.block_len(), seed)
            })
            .collect();
        let (_folder, path) = file_in_folder();
        check(&path, 1, &all, true);
        check(&path, 1, &all, false);
    }
}

/// The matrices outlive the objects that opened them.
#[test]
fn matrices_keep_the_file() {
    let (_folder, path) = file_in_folder();
    let (matrices, _) = load(&path, 7, &some()).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(matrices[2].tiles.as_slice(), in_memory(&some()[2]).tiles.as_slice());
    let file: Arc<MatrixFile> = MatrixFile::open(path.clone(), 7, 1).unwrap();
    assert_eq!((file.num_bytes(), file.resident_bytes()), (0, None), "not before it is finished");
}
