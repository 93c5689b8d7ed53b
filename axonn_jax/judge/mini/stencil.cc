//@ name stencil_mean_of_cross
//@ size 1000
//@ prompt
/* Store in each cell of output the mean of the same cell of input and its four neighbors (above, below, left, right).
   Cells outside of the grid count as 0. Both grids are N x N, in row-major order.
{model}   Example:

   input: [5, 0, 0, 0], N = 2
   output: [1, 1, 1, 0]
*/
void meanOfCross(std::vector<double> const& input, std::vector<double> &output, size_t N) {
//@ serial
    for (size_t i = 0; i < N; i += 1) {
        for (size_t j = 0; j < N; j += 1) {
            double sum = input[i * N + j];
            if (i > 0) sum += input[(i - 1) * N + j];
            if (i + 1 < N) sum += input[(i + 1) * N + j];
            if (j > 0) sum += input[i * N + j - 1];
            if (j + 1 < N) sum += input[i * N + j + 1];
            output[i * N + j] = sum / 5;
        }
    }
}
//@ omp
    auto cell = [&](long long i, long long j) {
        const long long n = N;
        return i < 0 || j < 0 || i >= n || j >= n ? 0.0 : input[i * n + j];
    };
    #pragma omp parallel for
    for (long long i = 0; i < (long long) N; i += 1) {
        for (long long j = 0; j < (long long) N; j += 1) {
            output[i * N + j] = (cell(i, j) + cell(i - 1, j) + cell(i + 1, j) + cell(i, j - 1) + cell(i, j + 1)) / 5;
        }
    }
}
//@ driver
struct Case {
    size_t n;
    std::vector<double> input, output;
};

Case draw(size_t size, Random &random) {
    Case made{size, {}, {}};
    for (size_t i = 0; i < size * size; i += 1) made.input.push_back(uniform(random, -1, 1));
    made.output.assign(size * size, 7.0);
    return made;
}

void sample(Case &c) { meanOfCross(c.input, c.output, c.n); }
void best(Case &c) { reference::meanOfCross(c.input, c.output, c.n); }
bool same(Case const &got, Case const &wanted) { return near(got.output, wanted.output); }
