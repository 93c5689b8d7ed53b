//@ name scan_of_running_maxima
//@ size 1000000
//@ prompt
/* Store in output[i] the largest of x[0], ..., x[i], for each i.
{model}   Example:

   input: x = [2, 1, 5, 3]
   output: output = [2, 2, 5, 5]
*/
void runningMaxima(std::vector<double> const& x, std::vector<double> &output) {
//@ serial
    double most = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < x.size(); i += 1) {
        most = std::max(most, x[i]);
        output[i] = most;
    }
}
//@ omp
    std::vector<double> largest;
    #pragma omp parallel
    {
        const size_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const size_t first = x.size() * thread / threads, last = x.size() * (thread + 1) / threads;
        #pragma omp single
        largest.assign(threads, -std::numeric_limits<double>::infinity());
        double most = -std::numeric_limits<double>::infinity();
        for (size_t i = first; i < last; i += 1) most = std::max(most, x[i]);
        largest[thread] = most;
        #pragma omp barrier
        most = -std::numeric_limits<double>::infinity();
        for (size_t before = 0; before < thread; before += 1) most = std::max(most, largest[before]);
        for (size_t i = first; i < last; i += 1) output[i] = most = std::max(most, x[i]);
    }
}
//@ driver
struct Case {
    std::vector<double> x, output;
};

Case draw(size_t size, Random &random) {
    Case made;
    for (size_t i = 0; i < size; i += 1) made.x.push_back(uniform(random, -2, 1) + 3.0 * i / size);
    made.output.assign(size, 7.0);
    return made;
}

void sample(Case &c) { runningMaxima(c.x, c.output); }
void best(Case &c) { reference::runningMaxima(c.x, c.output); }
bool same(Case const &got, Case const &wanted) { return got.output == wanted.output; }
