use std::os::unix::fs::PermissionsExt;

use super::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_replaced_file_is_private_and_leaves_no_temporary_one() {
    let folder = folder();
    let path = folder.path().join("state.json");
    for content in [b"old".as_slice(), b"newer"] {
        replace_file(&path, content).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(temporary_path(&path), folder.path().join("state.json.new"));
    assert!(!path_exists(&temporary_path(&path)).unwrap());
}

#[test]
fn a_failed_write_leaves_the_old_content() {
    let folder = folder();
    let path = folder.path().join("state.json");
    replace_file(&path, b"old").unwrap();
    let failed = replace_file_with(&path, |file| {
        file.write_all(b"ne")?;
        Err(std::io::ErrorKind::StorageFull.into())
    });
    assert!(matches!(failed, Err(ReplaceError::Unchanged(_))));
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert!(!path_exists(&temporary_path(&path)).unwrap());
}

#[test]
fn an_empty_folder_in_place_of_a_file_is_replaced_and_another_is_named() {
    let folder = folder();
    let path = folder.path().join("state.json");
    for in_the_way in [path.clone(), temporary_path(&path)] {
        let _ = std::fs::remove_file(&path);
        std::fs::create_dir(&in_the_way).unwrap();
        replace_file(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir_all(path.join("kept")).unwrap();
    let error = replace_file(&path, b"new").unwrap_err();
    assert!(error.full_message().contains(IS_FOLDER), "{error:?}");
    assert!(path.join("kept").exists());
}

#[test]
fn removing_reports_whether_the_file_existed() {
    let folder = folder();
    let path = folder.path().join("state.json");
    replace_file(&path, b"").unwrap();
    assert!(remove_if_present(&path).unwrap());
    assert!(!remove_if_present(&path).unwrap());
    assert!(remove_if_present(folder.path()).is_err(), "a folder is not removed");
}
