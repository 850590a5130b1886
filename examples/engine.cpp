/*  engine - a game loop that trains beside its other work, in C++.

        build/examples/engine                    12 seconds, in a window where there is one
        build/examples/engine --frames .         writes pictures
        build/examples/engine --fast --no-load   does not wait for the next frame; nothing beside it

    As in robot.c training runs in time slices. What comes in here: a job system of the host, a load
    that comes and goes, and a budget that changes, and is taken away, in the middle of a step.

    60 frames a second, and in two milliseconds of each a small network learns to paint an image from
    coordinates. A script (or keys, in a window) cuts the memory for training to a third, takes all of
    it away, and gives it back, while the loop goes on. At the end: a histogram of frame times, and how
    many slices ran over, by how much.

    With SDL2 (-DENGINE_SDL) and a display it is shown in a window (keys: T a third, F full, S suspend,
    R resume, Q quit); otherwise, with --frames, it is written to PNG files (-DENGINE_PNG), or PPM. What
    it has learnt is saved when the game ends, with --save, and --resume goes on from there, with the
    losses of a game that was not interrupted; --checkpoint-every saves between two steps, too. */
#define MEMSCALE_IMPLEMENTATION
#include "memscale.h"
#include "options.h"

#include "checkpoint.h"

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifdef ENGINE_SDL
#include <SDL.h>
#endif
#ifdef ENGINE_PNG
#include <png.h>
#endif

namespace {

double now_us() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(now).count();
}

// ------------------------------------------------------------------------------------------------
// the job system: pieces of one call at a time, by workers and by who calls

class jobs {
  public:
    explicit jobs(unsigned workers) {
        for (unsigned i = 0; i < workers; i++) {
            threads_.emplace_back([this] { work(); });
        }
    }
    ~jobs() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        changed_.notify_all();
        for (std::thread &thread : threads_) {
            thread.join();
        }
    }
    void run(uint32_t count, ms_piece_fn piece, void *argument) {
        std::unique_lock<std::mutex> lock(mutex_);
        piece_ = piece;
        argument_ = argument;
        next_ = done_ = 0;
        count_ = count;
        changed_.notify_all();
        take(lock);
        finished_.wait(lock, [this] { return done_ == count_; });
        count_ = next_ = done_ = 0;
    }
    static void run_for_library(void *self, uint32_t count, ms_piece_fn piece, void *argument) {
        static_cast<jobs *>(self)->run(count, piece, argument);
    }

  private:
    void take(std::unique_lock<std::mutex> &lock) {
        while (next_ < count_) {
            const uint32_t piece = next_++;
            lock.unlock();
            piece_(argument_, piece);
            lock.lock();
            if (++done_ == count_) {
                finished_.notify_all();
            }
        }
    }
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!ends_) {
            take(lock);
            changed_.wait(lock, [this] { return ends_ || next_ < count_; });
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_, finished_;
    std::vector<std::thread> threads_;
    ms_piece_fn piece_ = nullptr;
    void *argument_ = nullptr;
    uint32_t next_ = 0, count_ = 0, done_ = 0;
    bool ends_ = false;
};

// ------------------------------------------------------------------------------------------------
// the image

enum {
    SIDE = 96,
    ROWS = 4, // painted in a frame

    WAVES = 24,
    INPUTS = 2 * WAVES,
    HIDDEN = 64,
    COLOURS = 3,
    BATCH = 512,
    LAYERS = 4
};

struct random_numbers {
    uint32_t state;
    float unit() { // xorshift, Marsaglia, 2003
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        return static_cast<float>(state >> 8) / 16777216.0f;
    }
};

/* What it is to paint: a sun over the sea. */
void target_colour(float x, float y, float *rgb) {
    const float sky = y < 0.62f ? y / 0.62f : 1.0f;
    rgb[0] = 0.25f + 0.6f * sky;
    rgb[1] = 0.2f + 0.35f * sky;
    rgb[2] = 0.5f - 0.15f * sky;
    if (y > 0.62f) {
        const float wave =
            0.5f + 0.5f * std::sin(60.0f * (y - 0.62f) * (1.0f + 4.0f * y) + 6.0f * x);
        rgb[0] = 0.1f + 0.12f * wave;
        rgb[1] = 0.2f + 0.2f * wave;
        rgb[2] = 0.35f + 0.25f * wave;
    }
    const float dx = x - 0.6f, dy = y - 0.45f;
    if (dx * dx + dy * dy < 0.03f && y < 0.62f) {
        rgb[0] = 1.0f;
        rgb[1] = 0.85f;
        rgb[2] = 0.45f;
    }
}

/* Waves of random directions and lengths: Tancik et al., "Fourier features let networks learn high
   frequency functions in low dimensional domains", 2020. */
struct waves {
    float x[WAVES], y[WAVES];
    waves() {
        random_numbers random = {20261125};
        for (int i = 0; i < WAVES; i++) {
            const float angle = 6.2832f * random.unit(),
                        rate = 1.5f + 28.0f * random.unit() * random.unit();
            x[i] = rate * std::cos(angle);
            y[i] = rate * std::sin(angle);
        }
    }
    void features(float at_x, float at_y, float *to) const {
        for (int i = 0; i < WAVES; i++) {
            const float phase = x[i] * at_x + y[i] * at_y;
            to[2 * i] = std::sin(phase);
            to[2 * i + 1] = std::cos(phase);
        }
    }
};

// ------------------------------------------------------------------------------------------------
// the painter

void check(const ms::model &model, ms_result result) {
    if (result != MS_RESULT_OK) {
        std::fprintf(stderr, "%s\n", model.error());
        std::exit(1);
    }
}

const int widths[LAYERS + 1] = {INPUTS, HIDDEN, HIDDEN, HIDDEN, COLOURS};

class painter {
  public:
    painter(const ms_config &config, jobs &workers, checkpoint &saving)
        : model_(config), workers_(workers), saving_(saving) {
        x_ = ms_input(model_, "waves", MS_DTYPE_F32, ms_shape2(BATCH, INPUTS));
        target_ = ms_input(model_, "colours", MS_DTYPE_F32, ms_shape2(BATCH, COLOURS));
        ms_tensor at = x_;
        for (int i = 0; i < LAYERS; i++) {
            at = add_dense(i, at);
        }
        add_error(at);
        ms_optimizer_desc adamw = ms_optimizer_defaults(MS_OPTIMIZER_ADAMW);
        adamw.learning_rate = 0.002f;
        ms_set_optimizer(model_, &adamw);
        check(model_, ms_wrap(model_));
        for (int i = 0; i < LAYERS; i++) {
            weights_[i].resize(static_cast<size_t>(widths[i] * widths[i + 1]));
            biases_[i].resize(static_cast<size_t>(widths[i + 1]));
        }
        resume();
        random_numbers random = {1};
        for (int i = 0; i < LAYERS && !saving_.is_resumed; i++) {
            for (float &w : weights_[i]) {
                w = 3.4f * (random.unit() - 0.5f) / std::sqrt(static_cast<float>(widths[i]));
            }
            check(model_, model_.write(weight_[i], weights_[i]));
            check(model_, model_.write(bias_[i], biases_[i]));
        }
    }

    ms::model &model() {
        return model_;
    }
    uint64_t steps() const {
        return static_cast<uint64_t>(saving_.step);
    }
    /* Whether it has trained for so many steps, if that is not 0, or was to be interrupted by now. */
    bool is_done(int64_t steps) const {
        return saving_.is_stopped || (steps > 0 && saving_.step >= steps);
    }
    double loss() const {
        return loss_;
    }

    /* Trains for so many microseconds, of which a new batch takes some. Returns by how many
       microseconds the slice ran over. */
    double learn(double microseconds) {
        const double start_us = now_us();
        if (!in_step_) {
            write_batch();
        }
        const double slice_start_us = now_us();
        const double left_us = microseconds - (slice_start_us - start_us);
        const double slice_us = left_us > 0.0 ? left_us : 0.0;
        const ms_result result = ms_step_slice(model_, static_cast<uint64_t>(slice_us), &loss_);
        const double over_us = now_us() - slice_start_us - slice_us;
        in_step_ = result == MS_RESULT_MORE;
        if (!in_step_) {
            check(model_, result);
            take_step();
        }
        return over_us;
    }

    /* Microseconds of the longest instruction of a step: so short a slice runs one. That of the
       second step, as everything is slower the first time; no more than so many steps are trained. */
    double longest_us(int64_t steps) {
        double longest = 0.0;
        for (int step = 0; step < 2 && !is_done(steps); step++) {
            longest = 0.0;
            do {
                const double us = 2.0 + learn(2.0);
                longest = us > longest ? us : longest;
            } while (in_step_);
        }
        return longest;
    }

    /* Saves at the end. */
    void save() {
        end_step();
        if (!saving_.is_stopped && checkpoint_step(&saving_, model_, saving_.step, true) != 0) {
            std::exit(1);
        }
    }

    /* Ends the step that is under way: it does not count, and the next one gets its batch, unless it
       has begun to update. Then it is completed, and the cancel ends the next one, before that has
       run anything. */
    void end_step() {
        if (!in_step_) {
            return;
        }
        ms_cancel(model_);
        ms_result result = ms_step_slice(model_, UINT64_MAX, nullptr);
        if (result == MS_RESULT_OK) {
            take_step();
            result = ms_step_slice(model_, UINT64_MAX, nullptr);
        } else {
            random_ = before_batch_;
        }
        check(model_, result == MS_RESULT_CANCELLED ? MS_RESULT_OK : result);
        in_step_ = false;
    }

    /* Paints some rows, by the job system. */
    void paint(std::vector<uint8_t> &pixels, uint32_t first, uint32_t count) {
        pixels_ = &pixels;
        first_ = first;
        workers_.run(
            count, [](void *self, uint32_t row) { static_cast<painter *>(self)->paint_row(row); },
            this);
    }

  private:
    /* Goes on where an earlier game has ended, if that was asked for. */
    void resume() {
        check(model_, ms_save_extra(model_, "random", &random_, sizeof random_));
        check(model_, ms_save_extra(model_, "loss", &loss_, sizeof loss_));
        if (checkpoint_load(&saving_, model_) != 0) {
            std::exit(1);
        }
        checkpoint_print(&saving_);
        if (saving_.is_resumed) {
            take_params();
        }
    }

    /* Counts a step, and saves if it is time. */
    void take_step() {
        take_params();
        if (checkpoint_step(&saving_, model_, saving_.step + 1, false) != 0) {
            std::exit(1);
        }
    }

    /* Takes the params that paint while the next step is under way. */
    void take_params() {
        for (int i = 0; i < LAYERS; i++) {
            check(model_, model_.read(weight_[i], weights_[i]));
            check(model_, model_.read(bias_[i], biases_[i]));
        }
    }

    ms_tensor add_dense(int i, ms_tensor in) {
        ms_layer_desc d = ms_layer_desc();
        const bool last = i == LAYERS - 1;
        d.name = "dense";
        d.in[0] = in;
        d.param[0] = weight_[i] =
            ms_param(model_, "weight", MS_DTYPE_F32, ms_shape2(widths[i], widths[i + 1]));
        d.param[1] = bias_[i] = ms_param(model_, "bias", MS_DTYPE_F32, ms_shape1(widths[i + 1]));
        d.out[0] = ms_activation(model_, "y", MS_DTYPE_F32, ms_shape2(BATCH, widths[i + 1]));
        d.tile.axes = 1;
        d.backward_workspace.row_bytes = static_cast<uint64_t>(widths[i + 1]) * sizeof(float);
        model_.layer(
            d,
            [last](const ms_call &call) {
                const ms_matrix out = ms_matrix_of(&call.out[0]);
                const ms_result result = ms_gemm(&call, 1.0f, ms_matrix_of(&call.in[0]),
                                                 ms_matrix_of(&call.param[0]), 0.0f, out);
                const ms::span<float> y = ms::values<float>(call.out[0]);
                const ms::span<float> bias = ms::values<float>(call.param[1]);
                for (size_t k = 0; k < y.size(); k++) {
                    const float sum = y[k] + bias[k % bias.size()];
                    y[k] = last ? 1.0f / (1.0f + std::exp(-sum)) : std::tanh(sum);
                }
                return static_cast<int>(result);
            },
            [last](const ms_call &call) {
                const ms_view &to_in = call.grad_in[0], &to_weight = call.grad_param[0];
                const ms::span<float> y = ms::values<float>(call.out[0]);
                const ms::span<float> of = ms::values<float>(call.grad_out[0]);
                const ms::span<float> to_bias = ms::values<float>(call.grad_param[1]);
                float *gradient = static_cast<float *>(call.workspace);
                ms_matrix product = ms_matrix_of(&call.grad_out[0]);
                product.data = gradient;
                for (size_t k = 0; k < to_bias.size() && call.grad_param[1].beta == 0.0f; k++) {
                    to_bias[k] = 0.0f;
                }
                for (size_t k = 0; k < y.size(); k++) {
                    gradient[k] = of[k] * (last ? y[k] * (1.0f - y[k]) : 1.0f - y[k] * y[k]);
                    to_bias[k % to_bias.size()] += gradient[k];
                }
                ms_result result = ms_gemm(&call, 1.0f, ms_transpose(ms_matrix_of(&call.in[0])),
                                           product, to_weight.beta, ms_matrix_of(&to_weight));
                if (result == MS_RESULT_OK && to_in.data) {
                    result =
                        ms_gemm(&call, 1.0f, product, ms_transpose(ms_matrix_of(&call.param[0])),
                                to_in.beta, ms_matrix_of(&to_in));
                }
                return static_cast<int>(result);
            });
        return d.out[0];
    }

    void add_error(ms_tensor in) {
        ms_layer_desc d = ms_layer_desc();
        d.name = "error";
        d.in[0] = in;
        d.in[1] = target_;
        d.out[0] = ms_activation(model_, "loss", MS_DTYPE_F32, ms_shape1(BATCH));
        d.tile.axes = 1;
        model_.layer(
            d,
            [](const ms_call &call) {
                const ms::span<float> x = ms::values<float>(call.in[0]);
                const ms::span<float> target = ms::values<float>(call.in[1]);
                const ms::span<float> loss = ms::values<float>(call.out[0]);
                for (size_t r = 0; r < loss.size(); r++) {
                    loss[r] = 0.0f;
                    for (size_t k = r * COLOURS; k < (r + 1) * COLOURS; k++) {
                        loss[r] += (x[k] - target[k]) * (x[k] - target[k]);
                    }
                }
                return 0;
            },
            [](const ms_call &call) {
                const ms::span<float> x = ms::values<float>(call.in[0]);
                const ms::span<float> target = ms::values<float>(call.in[1]);
                const ms::span<float> of = ms::values<float>(call.grad_out[0]);
                const ms::span<float> to = ms::values<float>(call.grad_in[0]);
                for (size_t k = 0; k < to.size(); k++) {
                    const float old = call.grad_in[0].beta == 0.0f ? 0.0f : to[k];
                    to[k] = old + 2.0f * (x[k] - target[k]) * of[k / COLOURS];
                }
                return 0;
            });
        ms_set_loss(model_, d.out[0]);
    }

    void write_batch() {
        before_batch_ = random_;
        for (size_t r = 0; r < BATCH; r++) {
            const float x = random_.unit(), y = random_.unit();
            waves_.features(x, y, &batch_[r * INPUTS]);
            target_colour(x, y, &colours_[r * COLOURS]);
        }
        check(model_, model_.write(x_, batch_));
        check(model_, model_.write(target_, colours_));
    }

    void paint_row(uint32_t number) {
        const uint32_t row = first_ + number;
        for (uint32_t column = 0; column < SIDE; column++) {
            float x[INPUTS > HIDDEN ? INPUTS : HIDDEN], y[INPUTS > HIDDEN ? INPUTS : HIDDEN];
            waves_.features((static_cast<float>(column) + 0.5f) / SIDE,
                            (static_cast<float>(row) + 0.5f) / SIDE, x);
            for (int i = 0; i < LAYERS; i++) {
                for (int c = 0; c < widths[i + 1]; c++) {
                    y[c] = biases_[i][static_cast<size_t>(c)];
                }
                for (int r = 0; r < widths[i]; r++) {
                    const float *weight =
                        &weights_[i][static_cast<size_t>(r) * static_cast<size_t>(widths[i + 1])];
                    for (int c = 0; c < widths[i + 1]; c++) {
                        y[c] += x[r] * weight[c];
                    }
                }
                for (int c = 0; c < widths[i + 1]; c++) {
                    x[c] = i == LAYERS - 1 ? 1.0f / (1.0f + std::exp(-y[c])) : std::tanh(y[c]);
                }
            }
            for (uint32_t c = 0; c < COLOURS; c++) {
                (*pixels_)[(row * SIDE + column) * COLOURS + c] =
                    static_cast<uint8_t>(255.0f * x[c] + 0.5f);
            }
        }
    }

    ms::model model_;
    jobs &workers_;
    waves waves_;
    checkpoint &saving_; // counts the steps
    random_numbers random_ = {7}, before_batch_ = {7};
    ms_tensor x_ = {0}, target_ = {0}, weight_[LAYERS], bias_[LAYERS];
    std::vector<float> weights_[LAYERS], biases_[LAYERS];
    std::vector<float> batch_ = std::vector<float>(BATCH * INPUTS);
    std::vector<float> colours_ = std::vector<float>(BATCH * COLOURS);
    std::vector<uint8_t> *pixels_ = nullptr;
    uint32_t first_ = 0;
    bool in_step_ = false;
    double loss_ = 0.0;
};

// ------------------------------------------------------------------------------------------------
// what is shown

/* The picture beside what it is to be. */
std::vector<uint8_t> side_by_side(const std::vector<uint8_t> &painted) {
    std::vector<uint8_t> both(2 * SIDE * SIDE * COLOURS);
    for (size_t row = 0; row < SIDE; row++) {
        for (size_t column = 0; column < SIDE; column++) {
            float rgb[COLOURS];
            target_colour((static_cast<float>(column) + 0.5f) / SIDE,
                          (static_cast<float>(row) + 0.5f) / SIDE, rgb);
            for (size_t c = 0; c < COLOURS; c++) {
                both[(row * 2 * SIDE + column) * COLOURS + c] =
                    painted[(row * SIDE + column) * COLOURS + c];
                both[(row * 2 * SIDE + SIDE + column) * COLOURS + c] =
                    static_cast<uint8_t>(255.0f * rgb[c] + 0.5f);
            }
        }
    }
    return both;
}

void write_picture(const std::string &folder, int number, const std::vector<uint8_t> &pixels) {
    char name[32];
#ifdef ENGINE_PNG
    std::snprintf(name, sizeof name, "/frame%04d.png", number);
    png_image image;
    std::memset(&image, 0, sizeof image);
    image.version = PNG_IMAGE_VERSION;
    image.width = 2 * SIDE;
    image.height = SIDE;
    image.format = PNG_FORMAT_RGB;
    if (!png_image_write_to_file(&image, (folder + name).c_str(), 0, pixels.data(), 0, nullptr)) {
        std::fprintf(stderr, "%s%s: %s\n", folder.c_str(), name, image.message);
        std::exit(1);
    }
#else
    std::snprintf(name, sizeof name, "/frame%04d.ppm", number);
    std::FILE *file = std::fopen((folder + name).c_str(), "wb");
    if (!file) {
        std::perror((folder + name).c_str());
        std::exit(1);
    }
    std::fprintf(file, "P6 %d %d 255\n", 2 * SIDE, static_cast<int>(SIDE));
    (void)!std::fwrite(pixels.data(), 1, pixels.size(), file);
    std::fclose(file);
#endif
}

#ifdef ENGINE_SDL
class window {
  public:
    window() {
        if (has_display() && SDL_Init(SDL_INIT_VIDEO) == 0) {
            window_ = SDL_CreateWindow("memscale.h", SDL_WINDOWPOS_CENTERED, SDL_WINDOWPOS_CENTERED,
                                       8 * SIDE, 4 * SIDE, 0);
            renderer_ = window_ ? SDL_CreateRenderer(window_, -1, 0) : nullptr;
            texture_ = renderer_ ? SDL_CreateTexture(renderer_, SDL_PIXELFORMAT_RGB24,
                                                     SDL_TEXTUREACCESS_STREAMING, 2 * SIDE, SIDE)
                                 : nullptr;
        }
    }
    ~window() {
        SDL_Quit();
    }
    void show(const std::vector<uint8_t> &pixels) {
        if (texture_) {
            SDL_UpdateTexture(texture_, nullptr, pixels.data(), 2 * SIDE * COLOURS);
            SDL_RenderCopy(renderer_, texture_, nullptr, nullptr);
            SDL_RenderPresent(renderer_);
        }
    }
    /* The last key that was pressed, or 0. */
    int key() {
        SDL_Event event;
        int pressed = 0;
        while (texture_ && SDL_PollEvent(&event)) {
            pressed = event.type == SDL_QUIT      ? 'q'
                      : event.type == SDL_KEYDOWN ? static_cast<int>(event.key.keysym.sym)
                                                  : pressed;
        }
        return pressed;
    }

  private:
    static bool has_display() { // SDL says on stderr that there is none
#ifdef __linux__
        return std::getenv("DISPLAY") || std::getenv("WAYLAND_DISPLAY");
#else
        return true;
#endif
    }

    SDL_Window *window_ = nullptr;
    SDL_Renderer *renderer_ = nullptr;
    SDL_Texture *texture_ = nullptr;
};
#else
struct window {
    void show(const std::vector<uint8_t> &) {
    }
    int key() {
        return 0;
    }
};
#endif

// ------------------------------------------------------------------------------------------------
// the loop

/* Work of the game: some milliseconds on all workers, and three times as much for two of six seconds. */
struct game {
    double per_frame_us;
    volatile float sink[64];

    static void piece(void *self, uint32_t number) {
        game *g = static_cast<game *>(self);
        const double end = now_us() + g->per_frame_us;
        float x = static_cast<float>(number);
        while (now_us() < end) {
            for (int i = 0; i < 500; i++) {
                x = x * 0.99f + 1.0f;
            }
        }
        g->sink[number % 64] = x;
    }
};

struct histogram {
    enum { BINS = 12 };
    uint64_t count[BINS] = {0};
    void add(double ms) {
        const int bin = ms < 8.0    ? 0
                        : ms < 28.0 ? 1 + static_cast<int>((ms - 8.0) / 2.0)
                                    : BINS - 1;
        count[bin]++;
    }
    void print() const {
        for (int bin = 0; bin < BINS; bin++) {
            const double from = bin == 0 ? 0.0 : 6.0 + 2.0 * bin;
            if (bin < BINS - 1) {
                std::printf("  %2.0f to %2.0f ms", from, bin == 0 ? 8.0 : from + 2.0);
            } else {
                std::printf("  above %2.0f ms", from);
            }
            std::printf(": %llu\n", static_cast<unsigned long long>(count[bin]));
        }
    }
};

/* By how much slices ran over. What is expected of them is not to do so by more than the longest
   instruction. */
class slice_times {
  public:
    explicit slice_times(double longest_us) : longest_us_(longest_us) {
    }
    void add(double over_us) {
        int bin = 0;
        while (bin < BINS - 1 && over_us > edges_us[bin]) {
            bin++;
        }
        count_[bin]++;
        all_++;
        late_ += over_us > longest_us_;
        worst_us_ = over_us > worst_us_ ? over_us : worst_us_;
    }
    void print(uint64_t slice_us) const {
        std::printf("%llu slices of at most %llu us; ran over by\n", number(all_),
                    number(slice_us));
        for (int bin = 0; bin < BINS; bin++) {
            const bool is_last = bin == BINS - 1;
            std::printf("  %s %4.0f us: %llu\n", is_last ? "more than" : "at most  ",
                        edges_us[is_last ? bin - 1 : bin], number(count_[bin]));
        }
        std::printf(
            "the worst by %.0f us; by more than the longest instruction, %.0f us: %llu (%.3f "
            "%%)\n",
            worst_us_, longest_us_, number(late_),
            all_ > 0 ? 100.0 * static_cast<double>(late_) / static_cast<double>(all_) : 0.0);
    }

  private:
    enum { BINS = 6 };
    static constexpr double edges_us[BINS - 1] = {0.0, 30.0, 100.0, 300.0, 1000.0};
    static unsigned long long number(uint64_t n) {
        return static_cast<unsigned long long>(n);
    }
    double longest_us_, worst_us_ = 0.0;
    uint64_t all_ = 0, late_ = 0, count_[BINS] = {0};
};

constexpr double slice_times::edges_us[];

struct settings {
    float seconds = 12.0f;
    int64_t slice_us = 2000, steps = 0;
    const char *frames = nullptr;
    bool no_load = false, fast = false, debug = false;
    checkpoint saving = checkpoint();
};

settings parse_options(int argc, char **argv) {
    settings o;
    const option_spec specs[] = {
        {"--seconds", "S", OPTION_REAL, &o.seconds, "that the game runs"},
        {"--steps", "N", OPTION_COUNT, &o.steps, "of training, after which the game ends"},
        {"--slice", "US", OPTION_COUNT, &o.slice_us, "microseconds of training in a frame"},
        {"--frames", "FOLDER", OPTION_TEXT, &o.frames, "write pictures there"},
        CHECKPOINT_OPTIONS(&o.saving),
        {"--no-load", nullptr, OPTION_FLAG, &o.no_load, "no game beside the training"},
        {"--fast", nullptr, OPTION_FLAG, &o.fast, "do not wait for the next frame"},
        {"--debug", nullptr, OPTION_FLAG, &o.debug, OPTION_DEBUG_HELP},
    };
    if (take_options("[options]\nA game loop at 60 Hz that trains a net to paint an image.", specs,
                     OPTIONS_IN(specs), argc, argv, nullptr) != 0 ||
        checkpoint_check(&o.saving) != 0) {
        std::exit(2);
    }
    return o;
}

/* Memory for training, as the rest of the game allows. */
class memory {
  public:
    explicit memory(painter &p) : painter_(p) {
        ms_memory_report report;
        check(p.model(), ms_report(p.model(), &report));
        check(p.model(), ms_smallest_budget(p.model(), &smallest_));
        full_ = report.arena_bytes;
    }
    void obey(int key, double seconds) {
        ms::model &model = painter_.model();
        if (key == 't' || key == 'f') {
            const uint64_t third = full_ / 3 > smallest_ ? full_ / 3 : smallest_;
            painter_.end_step();
            ms_set_budget(model, key == 't' ? third : full_);
            check(model, ms_wrap(model));
            suspended_ = false;
        } else if (key == 's' && !suspended_) {
            check(model, ms_suspend(model, nullptr)); // a step may be under way
            suspended_ = true;
        } else if (key == 'r' && suspended_) {
            check(model, ms_resume(model));
            suspended_ = false;
        } else {
            return;
        }
        ms_memory_report report;
        check(model, ms_report(model, &report));
        std::printf("%5.2f s: %s, arena %.1f KiB\n", seconds,
                    key == 't'   ? "a third"
                    : key == 'f' ? "full"
                    : key == 's' ? "suspended"
                                 : "resumed",
                    suspended_ ? 0.0 : static_cast<double>(report.arena_bytes) / 1024.0);
    }
    bool is_suspended() const {
        return suspended_;
    }

  private:
    painter &painter_;
    uint64_t full_ = 0, smallest_ = 0;
    bool suspended_ = false;
};

} // namespace

int main(int argc, char **argv) {
    settings o = parse_options(argc, argv);
    const unsigned cores = std::thread::hardware_concurrency();
    jobs workers(cores > 2 ? cores - 2 : 1);
    ms_config config = ms_config();
    config.memory_budget_bytes = 64u << 20;
    config.max_instruction_us = 500.0;
    config.tiling = MS_SWITCH_ON;
    config.offloading = MS_SWITCH_OFF;
    config.log = log_warnings;
    config.debug = o.debug;
    config.parallel.run = jobs::run_for_library;
    config.parallel.user = &workers;
    painter p(config, workers, o.saving);
    memory arena(p);
    window shown;
    game load = {0.0, {0}};
    histogram frame_times;
    std::vector<uint8_t> pixels(SIDE * SIDE * COLOURS);
    const double frame_us = 1e6 / 60.0;
    const int frames = static_cast<int>(o.seconds * 60.0f);
    /* When, of the whole time, which key is pressed. */
    const struct {
        double at;
        int key;
    } script[] = {{0.4, 't'}, {0.6, 's'}, {0.7, 'r'}, {0.8, 'f'}};
    slice_times slices(p.longest_us(o.steps));
    double next_us = now_us();
    for (int frame = 0; frame < frames && !p.is_done(o.steps); frame++) {
        const double start_us = now_us();
        const bool is_heavy = frame / 60 % 6 >= 4;
        int key = shown.key();
        for (const auto &line : script) {
            key = frame == static_cast<int>(line.at * frames) ? line.key : key;
        }
        if (key == 'q') {
            break;
        }
        arena.obey(key, static_cast<double>(frame) / 60.0);
        load.per_frame_us = is_heavy ? 9000.0 : 3000.0;
        if (!o.no_load) {
            workers.run(cores > 1 ? 2 : 1, game::piece, &load);
        }
        const double left_us = frame_us - (now_us() - start_us) - 500.0;
        if (!arena.is_suspended() && left_us > 0.0) {
            const double most_us = static_cast<double>(o.slice_us);
            slices.add(p.learn(left_us < most_us ? left_us : most_us));
        }
        const int row = frame % (SIDE / ROWS) * ROWS; // some rows in each frame
        p.paint(pixels, static_cast<uint32_t>(row), ROWS);
        if (row + ROWS == SIDE) {
            const std::vector<uint8_t> both = side_by_side(pixels);
            shown.show(both);
            if (o.frames) {
                write_picture(o.frames, frame * ROWS / SIDE, both);
            }
        }
        frame_times.add((now_us() - start_us) / 1000.0);
        next_us += frame_us;
        if (!o.fast && next_us > now_us()) {
            std::this_thread::sleep_for(
                std::chrono::microseconds(static_cast<int64_t>(next_us - now_us())));
        }
    }
    if (arena.is_suspended()) {
        arena.obey('r', static_cast<double>(o.seconds));
    }
    p.save();
    std::printf("%llu steps, loss %.5f\n", static_cast<unsigned long long>(p.steps()), p.loss());
    print_debugged(o.debug);
    frame_times.print();
    slices.print(static_cast<uint64_t>(o.slice_us));
    return 0;
}
