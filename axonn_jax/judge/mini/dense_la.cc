//@ name dense_la_product_with_transpose
//@ size 1500
//@ prompt
/* Multiply the transpose of the M x N matrix A with the vector x and store the result in y: y = A^T x.
   A is stored in row-major order, x has M elements and y has N.
{model}   Example:

   input: A = [1, 2, 3, 4, 5, 6], x = [1, -1], M = 2, N = 3
   output: y = [-3, -3, -3]
*/
void multiplyTransposed(std::vector<double> const& A, std::vector<double> const& x, std::vector<double> &y, size_t M, size_t N) {
//@ serial
    std::fill(y.begin(), y.end(), 0.0);
    for (size_t i = 0; i < M; i += 1) {
        for (size_t j = 0; j < N; j += 1) {
            y[j] += A[i * N + j] * x[i];
        }
    }
}
//@ omp
    #pragma omp parallel
    {
        size_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        size_t first = N * thread / threads, last = N * (thread + 1) / threads;
        for (size_t j = first; j < last; j += 1) y[j] = 0.0;
        for (size_t i = 0; i < M; i += 1) {
            for (size_t j = first; j < last; j += 1) y[j] += A[i * N + j] * x[i];
        }
    }
}
//@ driver
struct Case {
    size_t rows, columns;
    std::vector<double> matrix, x, y;
};

Case draw(size_t size, Random &random) {
    Case made{size, size + 3, {}, {}, {}};
    made.matrix.resize(made.rows * made.columns);
    made.x.resize(made.rows);
    made.y.assign(made.columns, 7.0);
    for (double &value : made.matrix) value = uniform(random, -1, 1);
    for (double &value : made.x) value = uniform(random, -1, 1);
    return made;
}

void sample(Case &c) { multiplyTransposed(c.matrix, c.x, c.y, c.rows, c.columns); }
void best(Case &c) { reference::multiplyTransposed(c.matrix, c.x, c.y, c.rows, c.columns); }
bool same(Case const &got, Case const &wanted) { return near(got.y, wanted.y); }
