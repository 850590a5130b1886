/*  files.h - checkpoints in memory, whose sinks and sources can fail. */
#ifndef MEMSCALE_TEST_FILES_H
#define MEMSCALE_TEST_FILES_H

enum { T_FILE_MOST = 1 << 20 };

typedef struct t_file {
    uint8_t data[T_FILE_MOST];
    size_t bytes, writes, fails_at, reads;
} t_file;

static inline int t_file_write(void *user, const void *data, size_t bytes) {
    t_file *f = (t_file *)user;
    f->writes += 1;
    if (f->writes == f->fails_at || f->bytes + bytes > sizeof f->data) {
        return 1;
    }
    memcpy(f->data + f->bytes, data, bytes);
    f->bytes += bytes;
    return 0;
}

static inline int t_file_read(void *user, uint64_t offset, void *data, size_t bytes) {
    t_file *f = (t_file *)user;
    f->reads += 1;
    assert_true(offset <= f->bytes && bytes <= f->bytes - offset); // nothing is read beyond its end
    memcpy(data, f->data + offset, bytes);
    return f->reads == f->fails_at ? 1 : 0;
}

static inline void t_file_clear(t_file *f) {
    f->bytes = f->writes = f->fails_at = f->reads = 0;
}

static inline ms_result t_save(ms_model *m, t_file *f) {
    ms_sink sink;
    sink.write = t_file_write;
    sink.user = f;
    return ms_save(m, &sink);
}

static inline ms_result t_load(ms_model *m, t_file *f, const ms_load_options *options) {
    ms_source source;
    source.read = t_file_read;
    source.user = f;
    source.size = f->bytes;
    return ms_load(m, &source, options);
}

#endif // MEMSCALE_TEST_FILES_H
