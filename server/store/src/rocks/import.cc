// Makes a database whose families consist of files of another one. RocksDB offers this only in C++
// (CreateColumnFamilyWithImport). See import.rs.

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/metadata.h>
#include <rocksdb/sst_file_reader.h>
#include <rocksdb/sst_file_writer.h>
#include <rocksdb/table_properties.h>

using namespace rocksdb;

namespace {

constexpr int kLowestLevel = 6;

struct Table {
  size_t number;  // index of the file in the argument
  std::string first, last;
  bool is_external;   // written outside a database: all entries have the same number
  uint64_t sequence;  // that number, if it is known
};

Status Look(const std::string& path, Table* table) {
  SstFileReader reader{Options()};
  Status status = reader.Open(path);
  if (!status.ok()) return status;
  const auto properties = reader.GetTableProperties();
  const auto& collected = properties->user_collected_properties;
  table->is_external = collected.count("rocksdb.external_sst_file.version") > 0;
  const auto found = collected.find("rocksdb.external_sst_file.global_seqno");
  table->sequence = 0;
  if (found != collected.end() && found->second.size() == 8) {
    memcpy(&table->sequence, found->second.data(), 8);
  }
  ReadOptions options;
  options.ignore_range_deletions = true;
  std::unique_ptr<Iterator> entries(reader.NewIterator(options));
  entries->SeekToFirst();
  if (entries->Valid()) table->first = entries->key().ToString();
  entries->SeekToLast();
  if (entries->Valid()) table->last = entries->key().ToString();
  return entries->status();
}

// The level above all files that it overlaps; the lowest level if it overlaps none.
int LevelOf(const Table& table, std::vector<std::vector<Table>>* levels) {
  for (int level = 0; level <= kLowestLevel; level++) {
    for (const auto& other : (*levels)[level]) {
      if (table.first <= other.last && other.first <= table.last) return level - 1;
    }
  }
  return kLowestLevel;
}

Status MakeFamily(DB* db, const std::string& name, const std::string& folder, size_t count,
                  const char* const* files, uint64_t sequence, unsigned char* is_left_out) {
  ExportImportFilesMetaData metadata;
  metadata.db_comparator_name = BytewiseComparator()->Name();
  std::vector<std::vector<Table>> levels(kLowestLevel + 1);
  for (size_t i = 0; i < count; i++) {
    Table table;
    table.number = i;
    Status status = Look(folder + "/" + files[i], &table);
    if (!status.ok()) return status;
    const int level = table.first.empty() ? 0 : LevelOf(table, &levels);
    is_left_out[i] = level <= 0;
    if (level <= 0) continue;
    levels[level].push_back(table);
    LiveFileMetaData file;
    file.name = files[i];
    file.db_path = folder;
    file.level = level;
    file.largest_seqno = table.is_external && table.sequence ? table.sequence : sequence;
    file.smallest_seqno = table.is_external ? file.largest_seqno : 0;
    metadata.files.push_back(file);
  }
  ColumnFamilyHandle* handle = nullptr;
  Status status;
  if (metadata.files.empty()) {
    status = db->CreateColumnFamily(ColumnFamilyOptions(), name, &handle);
  } else {
    ImportColumnFamilyOptions options;
    options.move_files = true;
    status = db->CreateColumnFamilyWithImport(ColumnFamilyOptions(), name, options, metadata, &handle);
  }
  if (handle != nullptr) db->DestroyColumnFamilyHandle(handle);
  return status;
}

// Gives all further changes higher numbers than `sequence`. RocksDB continues after the numbers of
// imported files, but there may be none. So a file is imported into a family that is then dropped.
Status RaiseSequence(DB* db, const std::string& folder, uint64_t sequence) {
  LiveFileMetaData file;
  file.name = "coldrise-sequence.sst";
  file.db_path = folder;
  file.level = kLowestLevel;
  file.smallest_seqno = file.largest_seqno = sequence;
  Options plain;
  plain.compression = kNoCompression;
  SstFileWriter writer{EnvOptions(), plain};
  Status status = writer.Open(folder + "/" + file.name);
  if (status.ok()) status = writer.Put("sequence", "");
  if (status.ok()) status = writer.Finish();
  if (!status.ok()) return status;
  ExportImportFilesMetaData metadata;
  metadata.db_comparator_name = BytewiseComparator()->Name();
  metadata.files.push_back(file);
  ImportColumnFamilyOptions options;
  options.move_files = true;
  ColumnFamilyHandle* handle = nullptr;
  status = db->CreateColumnFamilyWithImport(ColumnFamilyOptions(), "coldrise-sequence", options, metadata, &handle);
  if (status.ok()) status = db->DropColumnFamily(handle);
  if (handle != nullptr) db->DestroyColumnFamilyHandle(handle);
  return status;
}

// Makes a database whose further files have higher numbers: RocksDB continues after a log's number.
Status OpenFrom(uint64_t number, const Options& options, const std::string& path, std::unique_ptr<DB>* db) {
  DB* opened = nullptr;
  Status status = DB::Open(options, path, &opened);
  db->reset(opened);
  if (status.ok()) status = opened->Close();
  db->reset();
  if (!status.ok()) return status;
  char name[32];
  snprintf(name, sizeof(name), "/%06llu.log", static_cast<unsigned long long>(number));
  std::unique_ptr<WritableFile> file;
  status = Env::Default()->NewWritableFile(path + name, &file, EnvOptions());
  if (status.ok()) status = file->Close();
  if (status.ok()) status = DB::Open(options, path, &opened);
  if (status.ok()) db->reset(opened);
  return status;
}

}  // namespace

// Makes a database in `path` with these families, in this order, in addition to the default one.
// `files` are names in `folder`, grouped by family; `counts` gives the number of each family's
// files. A file that does not fit is marked in `is_left_out`. Files of the database get higher
// numbers than `number`. All files are moved. Returns null, or the text of an error, which the
// caller frees.
extern "C" char* coldrise_make_database(const char* path, const char* log_directory, uint64_t sequence,
                                        uint64_t number, const char* folder, size_t families, const char* const* names,
                                        const size_t* counts, const char* const* files,
                                        unsigned char* is_left_out) {
  Status status;
  try {
    std::unique_ptr<DB> db;
    Options options;
    options.create_if_missing = true;
    options.db_log_dir = log_directory;
    options.allow_fallocate = false;
    options.max_open_files = -1;
    options.disable_auto_compactions = true;
    status = OpenFrom(number, options, path, &db);
    size_t at = 0;
    for (size_t i = 0; i < families && status.ok(); i++) {
      status = MakeFamily(db.get(), names[i], folder, counts[i], files + at, sequence, is_left_out + at);
      at += counts[i];
    }
    if (status.ok()) status = RaiseSequence(db.get(), folder, sequence);
    if (db) {
      const Status closed = db->Close();
      if (status.ok()) status = closed;
    }
  } catch (const std::exception& error) {
    status = Status::Aborted(error.what());
  }
  return status.ok() ? nullptr : strdup(status.ToString().c_str());
}
