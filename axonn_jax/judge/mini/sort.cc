//@ name sort_by_magnitude
//@ size 100000
//@ prompt
/* Sort x by absolute value in ascending order; of two elements with the same absolute value the negative comes first.
{model}   Example:

   input: [3, -1, 1, -4, 2]
   output: [-1, 1, 2, 3, -4]
*/
void sortByMagnitude(std::vector<int> &x) {
//@ serial
    std::sort(x.begin(), x.end(), [](int a, int b) {
        const int left = std::abs(a), right = std::abs(b);
        return left < right || (left == right && a < b);
    });
}
//@ omp
    auto less = [](int a, int b) { return std::make_pair(std::abs(a), a) < std::make_pair(std::abs(b), b); };
    const size_t parts = omp_get_max_threads();
    std::vector<size_t> bounds;
    for (size_t part = 0; part <= parts; part += 1) bounds.push_back(x.size() * part / parts);
    #pragma omp parallel for schedule(static, 1)
    for (size_t part = 0; part < parts; part += 1) std::sort(x.begin() + bounds[part], x.begin() + bounds[part + 1], less);
    for (size_t width = 1; width < parts; width *= 2) {
        #pragma omp parallel for schedule(static, 1)
        for (size_t part = 0; part < parts; part += 2 * width) {
            const size_t middle = std::min(part + width, parts), end = std::min(part + 2 * width, parts);
            std::inplace_merge(x.begin() + bounds[part], x.begin() + bounds[middle], x.begin() + bounds[end], less);
        }
    }
}
//@ driver
struct Case {
    std::vector<int> x;
};

Case draw(size_t size, Random &random) {
    Case made;
    for (size_t i = 0; i < size; i += 1) made.x.push_back(whole(random, -5000, 5000));
    return made;
}

void sample(Case &c) { sortByMagnitude(c.x); }
void best(Case &c) { reference::sortByMagnitude(c.x); }
bool same(Case const &got, Case const &wanted) { return got.x == wanted.x; }
