//! Compiles the one function of RocksDB that its C interface lacks.

fn main() {
    println!("cargo:rerun-if-changed=src/rocks/import.cc");
    println!("cargo:rerun-if-env-changed=ROCKSDB_INCLUDE_DIR");
    let mut build = cc::Build::new();
    if let Ok(folder) = std::env::var("ROCKSDB_INCLUDE_DIR") {
        build.include(folder);
    }
    build.cpp(true).std("c++17").warnings(true).file("src/rocks/import.cc");
    build.compile("coldrise_import");
}
