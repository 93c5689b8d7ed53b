//@ name histogram_of_equal_bins
//@ size 1000000
//@ prompt
/* Count the elements of x in each of bins.size() equal intervals of [0, 1): an element e is in interval
   floor(e * bins.size()). All elements are at least 0 and below 1.
{model}   Example:

   input: x = [0.1, 0.3, 0.9, 0.95, 0.26], bins with 4 elements
   output: bins = [1, 2, 0, 2]
*/
void countBins(std::vector<double> const& x, std::vector<size_t> &bins) {
//@ serial
    std::fill(bins.begin(), bins.end(), 0);
    for (double value : x) bins[size_t(value * bins.size())] += 1;
}
//@ omp
    std::fill(bins.begin(), bins.end(), 0);
    #pragma omp parallel
    {
        std::vector<size_t> own(bins.size(), 0);
        #pragma omp for nowait
        for (size_t i = 0; i < x.size(); i += 1) own[static_cast<size_t>(x[i] * own.size())] += 1;
        #pragma omp critical
        for (size_t bin = 0; bin < own.size(); bin += 1) bins[bin] += own[bin];
    }
}
//@ driver
struct Case {
    std::vector<double> x;
    std::vector<size_t> bins;
};

Case draw(size_t size, Random &random) {
    Case made;
    for (size_t i = 0; i < size; i += 1) made.x.push_back(std::pow(uniform(random, 0, 0.999), 2));
    made.bins.assign(32, 7);
    return made;
}

void sample(Case &c) { countBins(c.x, c.bins); }
void best(Case &c) { reference::countBins(c.x, c.bins); }
bool same(Case const &got, Case const &wanted) { return got.bins == wanted.bins; }
