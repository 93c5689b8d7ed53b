//@ name fft_in_place
//@ size 65536
//@ prompt
/* Replace x by its discrete Fourier transform, X[k] = sum over j of x[j] * exp(-2 pi i j k / N).
   The number N of elements is a power of two.
{model}   Example:

   input: [1, 2, 3, 4]
   output: [10, -2+2i, -2, -2-2i]
*/
void fft(std::vector<std::complex<double>> &x) {
//@ serial
    const size_t N = x.size();
    for (size_t i = 1, j = 0; i < N; i += 1) {
        size_t bit = N >> 1;
        for (; j & bit; bit >>= 1) j ^= bit;
        j ^= bit;
        if (i < j) std::swap(x[i], x[j]);
    }
    std::vector<std::complex<double>> roots(N / 2);
    for (size_t k = 0; k < N / 2; k += 1) roots[k] = std::polar(1.0, -2 * M_PI * k / N);
    for (size_t half = 1; half < N; half *= 2) {
        for (size_t start = 0; start < N; start += 2 * half) {
            for (size_t k = 0; k < half; k += 1) {
                const std::complex<double> odd = roots[k * (N / (2 * half))] * x[start + k + half];
                const std::complex<double> even = x[start + k];
                x[start + k] = even + odd;
                x[start + k + half] = even - odd;
            }
        }
    }
}
//@ omp
    const size_t N = x.size();
    std::vector<std::complex<double>> other(N), roots(N / 2);
    #pragma omp parallel for
    for (size_t k = 0; k < N / 2; k += 1) roots[k] = std::polar(1.0, -2 * M_PI * k / N);
    // Stockham: no reversal of bits
    for (size_t stride = 1; stride < N; stride *= 2) {
        #pragma omp parallel for
        for (size_t at = 0; at < N / 2; at += 1) {
            const size_t group = at / stride, place = at % stride;
            const std::complex<double> a = x[place + stride * group], b = x[place + stride * group + N / 2];
            other[place + 2 * stride * group] = a + b;
            other[place + 2 * stride * group + stride] = (a - b) * roots[group * stride];
        }
        x.swap(other);
    }
}
//@ driver
struct Case {
    std::vector<std::complex<double>> x;
};

Case draw(size_t size, Random &random) {
    Case made;
    for (size_t i = 0; i < size; i += 1) made.x.emplace_back(uniform(random, -1, 1), uniform(random, -1, 1));
    return made;
}

void sample(Case &c) { fft(c.x); }
void best(Case &c) { reference::fft(c.x); }
bool same(Case const &got, Case const &wanted) {
    if (got.x.size() != wanted.x.size()) return false;
    for (size_t i = 0; i < got.x.size(); i += 1) {
        if (!(std::abs(got.x[i] - wanted.x[i]) <= 1e-8 * std::sqrt(double(got.x.size())))) return false;
    }
    return true;
}
