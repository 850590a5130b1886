/* The heads of attention on CUDA go through the products in groups, of which small sizes make one:
 * here groups are small. The tests of test_nn.c that have attention, and what the groups ask for. */
#define MEMSCALE_CUDA_IMPLEMENTATION
#define NN_CUDA_IMPLEMENTATION
#define NN_GROUP_FLOATS 3000
#define T_CUDA
#define main all_of_test_nn
#include "../test_nn.c"
#undef main

/* Floats that a call takes, as nn_cuda_attention and its backward do; backward has kept scores. */
static int64_t floats_taken(nn_attention_size n, bool backward, bool keeps, ms_dtype dtype) {
    const nn_groups groups = nn_cuda_groups(n);
    float *const begin = (float *)(uintptr_t)4096; // nobody reads it
    int64_t most = 0;
    for (int64_t i = 0; i < groups.count; i++) {
        nn_group g = nn_cuda_group(NULL, i, groups, nn_f32(keeps ? begin : NULL), dtype, begin, n);
        if (backward || g.p.computed == NULL) {
            nn_cuda_take(&g, g.heads * n.sequence * n.sequence);
        }
        for (int k = 0; k < (g.packed ? 3 + backward : backward); k++) {
            nn_group_room(&g, dtype);
        }
        most = nn_most(most, g.spare - begin);
    }
    return most;
}

/* All heads are in one group each, and no group asks for more than the workspace of a larger
 * size. */
static void check_groups(nn_attention_size n, nn_attention_size largest) {
    const nn_groups groups = nn_cuda_groups(n);
    int64_t heads = 0;
    for (int64_t i = 0; i < groups.count; i++) {
        const nn_group g = nn_cuda_group(NULL, i, groups, nn_f32(NULL), MS_DTYPE_F32, NULL, n);
        assert_int_equal(g.first * n.heads + g.head, heads);
        heads += g.heads;
    }
    assert_int_equal(heads, n.batch * n.heads);
    for (int i = 0; i < 4; i++) {
        const ms_dtype dtype = i < 2 ? MS_DTYPE_F32 : MS_DTYPE_BF16;
        const bool keeps = i % 2 != 0;
        assert_true(floats_taken(n, false, keeps, dtype) <=
                    nn_cuda_attention_floats(largest, false));
        assert_true(!keeps ||
                    floats_taken(n, true, keeps, dtype) <= nn_cuda_attention_floats(largest, true));
    }
}

static void groups_of_heads_fit_the_kernels(void **state) {
    (void)state;
    t_rng rng = t_seed(3);
    int packed = 0;
    for (int i = 0; i < 3000; i++) {
        nn_attention_size largest =
            nn_plain_attention(1 + (int64_t)t_below(&rng, i % 3 == 0 ? 140 : 9),
                               1 + (int64_t)t_below(&rng, 70), false);
        largest.batch = 1 + (int64_t)t_below(&rng, 6);
        largest.sequence = 1 + (int64_t)t_below(&rng, i % 2 == 0 ? 40 : 900);
        nn_attention_size n = largest;
        n.batch = 1 + (int64_t)t_below(&rng, (uint32_t)largest.batch);
        n.sequence = 1 + (int64_t)t_below(&rng, (uint32_t)largest.sequence);
        check_groups(n, largest);
        check_groups(largest, largest);
        packed += nn_cuda_groups(n).packed;
    }
    assert_in_range(packed, 300, 2700);
}

/* The partial sums of columns fit their room, and that of all larger sizes. */
static void partial_sums_of_columns_fit_their_room(void **state) {
    (void)state;
    t_rng rng = t_seed(4);
    for (int i = 0; i < 3000; i++) {
        const int64_t rows = 1 + (int64_t)t_below(&rng, i % 2 == 0 ? 90 : 90000);
        const int64_t columns = 1 + (int64_t)t_below(&rng, i % 3 == 0 ? 300 : 300000);
        const int64_t more_rows = rows + (int64_t)t_below(&rng, 1000);
        const int64_t more_columns = columns + (int64_t)t_below(&rng, 1000);
        const int64_t chunk = nn_divide_up(rows, nn_cuda_chunks(rows, columns));
        const int64_t taken = nn_divide_up(rows, chunk) * columns;
        assert_true(taken <= nn_cuda_column_floats(rows, columns));
        assert_true(taken <= nn_cuda_column_floats(more_rows, more_columns));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_of_heads_fit_the_kernels),      cmocka_unit_test(partial_sums_of_columns_fit_their_room),
        cmocka_unit_test(attention_matches_float64),   cmocka_unit_test(blocks_give_the_bits_of_operators),
        cmocka_unit_test(gradients_of_models_with_dropout_are_slopes),
    };
    (void)all_of_test_nn;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
